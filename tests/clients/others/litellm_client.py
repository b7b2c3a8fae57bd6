"""litellm with openai 2.x: chat, JSON Schema, tools, streams with usage."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 30, 41]


url, key, name = sys.argv[1:]
common = {
    "model": f"openai/{name}",
    "api_base": f"{url}/v1",
    "api_key": key,
    "temperature": 0,
    "num_retries": 0,
    "messages": [{"role": "user", "content": "Bob is 41 years old."}],
}
answer = litellm.completion(max_tokens=60, response_format=Person, **common)
Person.model_validate_json(answer.choices[0].message.content)
tool = {"type": "function", "function": {"name": "Person", "parameters": Person.model_json_schema()}}
answer = litellm.completion(max_tokens=80, tools=[tool], tool_choice="required", **common)
Person.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)
chunks = list(
    litellm.completion(
        max_tokens=80, tools=[tool], tool_choice="required", stream=True,
        stream_options={"include_usage": True}, **common,
    )
)  # fmt: skip
built = litellm.stream_chunk_builder(chunks)
assert json.loads(built.choices[0].message.tool_calls[0].function.arguments)["age"] in (7, 30, 41)
assert built.usage.completion_tokens > 5
plain = [litellm.completion(max_tokens=6, **common) for _ in range(2)][-1]
assert plain.usage.prompt_tokens_details.cached_tokens > 5, plain.usage
told = ""
try:
    litellm.completion(max_tokens=6, **{**common, "temperature": -1})
except litellm.BadRequestError as error:
    told = str(error)
assert "temperature" in told
