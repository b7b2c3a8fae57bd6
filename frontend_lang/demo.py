"""The program of `radixrt demo`: few-shot, constrained, forked, and a choice."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from frontend_lang.builders import gen, select
from frontend_lang.program import program
from frontend_lang.state import State

EXAMPLES = """Product reviews as data.

Review: The kettle boils fast but the lid is loose.
JSON: {"product": "kettle", "stars": 3, "mood": "mixed"}
Good: It boils water very fast.
Bad: The lid is loose.
Advice: keep it

Review: These shoes fell apart in a week. A waste of money.
JSON: {"product": "shoes", "stars": 1, "mood": "angry"}
Good: Nothing at all.
Bad: They fell apart in a week.
Advice: return it

Review: Best backpack I ever had, light and roomy.
JSON: {"product": "backpack", "stars": 5, "mood": "happy"}
Good: It is light and roomy.
Bad: Nothing at all.
Advice: keep it

"""


class Review(BaseModel):
    """What a review says."""

    product: str = Field(pattern="^[a-z ]{1,16}$")
    stars: int = Field(ge=1, le=5)
    mood: Literal["happy", "mixed", "angry"]


@program
def judge_review(s: State, text: str) -> dict[str, Any]:
    s += EXAMPLES  # computed once, whatever follows
    s += f"Review: {text}\nJSON: " + gen("review", schema=Review, max_tokens=48, temperature=0)
    good, bad = branches = s.fork(2)  # both share every token so far
    good += "\nGood:" + gen("good", max_tokens=16, temperature=0, stop="\n")
    bad += "\nBad:" + gen("bad", max_tokens=16, temperature=0, stop="\n")
    branches.join()
    s += f"\nGood:{good['good']}\nBad:{bad['bad']}\nAdvice: "
    s += select("advice", choices=["keep it", "return it"])
    review: Review = s["review"]  # validated
    return {"review": review, "good": good["good"], "bad": bad["bad"], "advice": s["advice"]}
