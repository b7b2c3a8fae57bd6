"""pydantic-ai: output by a strict tool and by JSON Schema, tools that are run, streams."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 30, 41]


url, key, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
settings = ModelSettings(temperature=0, max_tokens=120, parallel_tool_calls=False)


async def work() -> None:
    for output in (Person, NativeOutput(Person)):
        found = await Agent(model, output_type=output, model_settings=settings).run("Bob is 41 years old.")
        assert isinstance(found.output, Person), found
        assert found.usage.output_tokens > 3 if not callable(found.usage) else found.usage().output_tokens > 3
    async with Agent(model, model_settings=settings).run_stream("Say hello.") as stream:
        text = "".join([part async for part in stream.stream_text(delta=True)])
    assert text


asyncio.run(work())
