"""dspy: its field marks, JSON, several answers."""

import contextlib
import sys

import dspy
from dspy.utils.exceptions import AdapterParseError

url, key, name = sys.argv[1:]
lm = dspy.LM(
    f"openai/{name}",
    api_base=f"{url}/v1",
    api_key=key,
    temperature=0,
    max_tokens=120,
    cache=False,
    num_retries=0,
)
assert len(lm("Name a colour.", n=2, temperature=0.7)) == 2
assert lm(messages=[{"role": "user", "content": "Give JSON."}], response_format={"type": "json_object"})[
    0
].startswith("{")
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Judge(dspy.Signature):
    """Judge a review."""

    review: str = dspy.InputField()
    verdict: str = dspy.OutputField()


# The small model may miss what the signature asks for; the server must not be what fails.
with contextlib.suppress(AdapterParseError):
    assert isinstance(dspy.Predict(Judge)(review="It broke after two days.").verdict, str)
