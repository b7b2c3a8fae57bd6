"""guidance over vLLM's surface: regular expressions and choices."""

import sys

from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel

url, key, name = sys.argv[1:]
model = VLLMModel(name, base_url=f"{url}/v1", api_key=key, echo=False)
with user():
    model += "Bob is 41 years old. How old is Bob?"
with assistant():
    number = model + gen("age", regex="[0-9]{1,3}")
    assert number["age"].isdecimal()
    chosen = model + select(["young", "old"], name="is")
    assert chosen["is"] in ("young", "old")
