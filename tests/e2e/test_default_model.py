"""The main job on the small default model: the laws, and few-shot questions over one shared prefix."""

import json
from pathlib import Path

import pytest

from frontend_lang import gen, program
from radixrt import Engine, GrammarSpec, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
STEM = "The village of Arden lies between two rivers. Its people "
ENDS = ["grow apples", "build boats and", "say that", "trade with the coast, where"]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_answers_do_not_depend_on_cache_company_chunks_or_seats():
    prompts = [STEM + end for end in ENDS]
    warm = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=5)
    with Engine(dtype="float32", prefix_cache=False, num_pages=500) as engine:
        alone = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
        seeded = engine.generate(prompts[0], warm).token_ids
    with Engine(dtype="float32", num_pages=500, max_step_tokens=9, checks="step") as engine:
        for _ in range(2):
            assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == alone
        batch = engine.generate([prompts[0], *prompts], [warm, *[GREEDY] * 4])
        assert batch[0].token_ids == seeded
        samples = engine.generate(prompts[0], SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=4))
        assert samples.usage.cached_tokens == samples.usage.prompt_tokens - 1
        assert samples.usage.computed_tokens == 4 * 1 + sum(
            len(item.token_ids) - 1 for item in samples.samples
        )


def test_schema_gives_a_valid_object_with_forced_tokens():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["happy", "sad"]},
        },
        "required": ["name", "age", "mood"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(max_tokens=64, temperature=1.0, seed=2, grammar=GrammarSpec.json_schema(schema))
    with Engine(num_pages=500) as engine:
        outputs = engine.generate(["Describe a person as JSON:"] * 4, sampling)
    for output in outputs:
        value = json.loads(output.text)
        assert list(value) == ["name", "age", "mood"]
        assert value["mood"] in ("happy", "sad")
        assert 0 <= value["age"] <= 150
        assert output.usage.forced_tokens > 0


@program
def solve(s, shots, question):
    for shot in shots:
        s += f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n"
    s += f"Question: {question}\nAnswer:" + gen("answer", max_tokens=8, temperature=0)


def made_up_questions():
    """Eight worked examples and 32 questions in the style of GSM8K."""
    things = ["apples", "books", "coins", "pens", "cards", "stones", "cups", "eggs"]
    shots = [
        {
            "question": f"Ann has {n + 3} boxes with {n + 5} {thing} each. She gives {n} {thing} to Tom and finds "
            f"{n + 9} more on her way home. How many {thing} has Ann in the end?",
            "answer": f"The boxes hold {n + 3} * {n + 5} = {(n + 3) * (n + 5)} {thing}. After the gift there are "
            f"{(n + 3) * (n + 5) - n}. With those she found, Ann has {(n + 3) * (n + 5) + 9} {thing}.",
        }
        for n, thing in enumerate(things, start=2)
    ]
    questions = [
        f"Ben buys {n} {things[n % 8]} a day. How many has he after {n + 2} days?" for n in range(32)
    ]
    return shots, questions


def gsm8k_questions():
    read = [
        [json.loads(line) for line in (GSM8K / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train_first200.jsonl", "test_first200.jsonl")
    ]
    return read[0][:8], [item["question"] for item in read[1][:32]]


@pytest.mark.parametrize(
    "questions_of",
    [
        made_up_questions,
        pytest.param(
            gsm8k_questions,
            marks=pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the GSM8K sample"),
        ),
    ],
)
def test_few_shot_questions_compute_their_shared_prefix_once(questions_of):
    shots, questions = questions_of()
    with Engine(num_pages=2000) as engine:
        outcomes = solve.with_options(engine=engine).map([{"shots": shots, "question": q} for q in questions])
        calls = [call for outcome in outcomes for call in outcome.unwrap().calls]
        prefix = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
        num_prefix = len(engine.tokenizer.encode(prefix))
        num_computed = engine.stats().computed_tokens
    assert [len(outcome.unwrap().calls) for outcome in outcomes] == [1] * 32
    num_prompt = sum(call.prompt_tokens for call in calls)
    assert sum(call.cached_tokens for call in calls) >= 0.85 * num_prompt
    num_own = num_prompt - 32 * num_prefix
    num_outputs = sum(call.output_tokens for call in calls)
    assert num_computed <= num_prefix + num_own + num_outputs + 32
