"""What a type checker must see: read by test_typing.py through mypy --strict, never run."""

from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, TypedDict, assert_type

from pydantic import BaseModel

from frontend_lang import (
    Branches,
    ProgramResult,
    State,
    ToolAnswer,
    ToolCall,
    decide,
    gen,
    predicate,
    program,
    select,
)


class Person(BaseModel):
    name: str
    age: int


class Place(TypedDict):
    city: str


@dataclass
class Point:
    x: float


class Colour(Enum):
    RED = "red"


@program
def typed(s: State, question: str, *, loud: bool = False) -> int:
    person = gen("person", schema=Person, max_tokens=64, temperature=0)
    s += "Who? " + person
    assert_type(s[person], Person)
    place = gen("place", schema=Place)
    s += place
    assert_type(s[place], Place)
    point = gen(schema=Point)
    s += point
    assert_type(s[point], Point)
    people = gen("people", schema=list[Person])
    s += people
    assert_type(s[people], list[Person])
    number = gen("number", type=int)
    s += number
    assert_type(s[number], int)
    day = gen("day", type=date, heal=True)
    s += day
    assert_type(s[day], date)
    colour = gen("colour", type=Colour)
    s += colour
    assert_type(s[colour], Colour)
    text = gen("text", regex="[a-z]+")
    s += text
    assert_type(s[text], str)
    several = gen("several", n=3)
    s += several
    assert_type(s[several], Branches)
    choice = select("choice", ["a", "b"])
    s += choice
    assert_type(s[choice], str)
    call = gen("call", tools=[len])
    s += call
    assert_type(s[call], ToolCall)
    answer = gen("answer", tools=[len], max_rounds=3, temperature=0)
    s += answer
    assert_type(s[answer], ToolAnswer)
    decisions = decide("decisions", {"sure": predicate("Sure?")})
    s += decisions
    assert_type(s[decisions]["sure"].probability, float)
    assert_type(s["person"], Any)
    assert_type(s.gen("person", schema=Person), Person)
    assert_type(s.gen("text", max_tokens=5), str)
    assert_type(s.select("choice", ["a", "b"]), str)
    return s[person].age


@program
async def awaited(s: State) -> None:
    person = gen("person", schema=Person)
    s += person
    assert_type(await s.value(person), Person)


def use() -> None:
    result = typed.run("Who?", loud=True)
    assert_type(result, ProgramResult[int])
    assert_type(result.value, int)
    assert_type(result[gen("person", schema=Person)], Person)
    assert_type(typed.stream("Who?").result(), ProgramResult[int])
