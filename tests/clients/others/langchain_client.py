"""langchain-openai: structured output three ways, tools, streams, cached tokens, responses."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 30, 41]


url, key, name = sys.argv[1:]
options = {"model": name, "base_url": f"{url}/v1", "api_key": key, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(max_tokens=100, **options)
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Person, method=method).invoke("Bob is 41 years old.")
    assert isinstance(found, Person), found
found = model.bind_tools([Person], tool_choice="any", parallel_tool_calls=False).invoke("Bob is 41.")
assert found.tool_calls[0]["name"] == "Person", found
merged = None
for chunk in model.bind_tools([Person], tool_choice="Person").stream("Bob is 41."):
    merged = chunk if merged is None else merged + chunk
Person.model_validate(merged.tool_calls[0]["args"])
first = model.invoke("Say hello to everyone who came here today.", max_tokens=5)
again = model.invoke("Say hello to everyone who came here today.", max_tokens=5)
assert again.content == first.content
assert again.usage_metadata["input_token_details"]["cache_read"] > 10, again.usage_metadata
logged = model.bind(logprobs=True, top_logprobs=2).invoke("Hi", max_tokens=3)
assert len(logged.response_metadata["logprobs"]["content"]) == 3
answer = ChatOpenAI(use_responses_api=True, **options).invoke("Say hello.", max_output_tokens=16)
assert answer.content
