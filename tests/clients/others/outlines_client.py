"""outlines: JSON through OpenAI's surface, regex and Lark through vLLM's, regex through SGLang's."""

import json
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 30, 41]


url, key, name = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
for made in (
    outlines.from_openai(client, name),
    outlines.from_vllm(client, name),
    outlines.from_sglang(client, name),
):
    found = made("Bob is 41 years old.", Person, max_tokens=60, temperature=0)
    Person.model_validate(json.loads(found))
for made in (outlines.from_vllm(client, name), outlines.from_sglang(client, name)):
    assert made("Yes or no?", Regex("yes|no"), max_tokens=8) in ("yes", "no")
found = outlines.from_vllm(client, name)("Say it.", CFG('start: "a" | "b"'), max_tokens=8)
assert found in ("a", "b"), found
