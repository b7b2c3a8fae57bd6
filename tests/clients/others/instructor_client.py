"""instructor: forced tools, JSON, JSON Schema, responses; partial objects as they are streamed."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 30, 41]


url, key, model = sys.argv[1:]
asked = {"model": model, "messages": [{"role": "user", "content": "Bob is 41 years old."}], "temperature": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=mode)
    person, raw = client.chat.completions.create_with_completion(
        response_model=Person, max_tokens=100, max_retries=0, **asked
    )
    assert isinstance(person, Person), person
    assert raw.usage.completion_tokens > 3
    parts = list(client.chat.completions.create_partial(response_model=Person, max_tokens=100, **asked))
    assert parts[-1].age in (7, 30, 41), parts
client = instructor.from_openai(
    openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=instructor.Mode.RESPONSES_TOOLS
)
person = client.responses.create(
    model=model, input="Bob is 41 years old.", response_model=Person, max_output_tokens=100, max_retries=0
)
assert isinstance(person, Person), person
