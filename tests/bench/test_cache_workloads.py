import json
from array import array

import pytest

from radixrt.bench.optimum import belady_tokens, infinite_pool_tokens
from radixrt.bench.recorded import encode_bytes, read_workload
from radixrt.bench.workloads import (
    GENERATED,
    FreshTokens,
    SimRequest,
    burst,
    few_shot,
    multi_turn,
    no_sharing,
    tree_of_thought,
    zipf,
)
from radixrt.errors import InvalidRequest, InvariantViolation


def common(left, right):
    num_common = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num_common += 1
    return num_common


def request(prompt, output=(), **options):
    return SimRequest(0.0, array("i", prompt), array("i", output), **options)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_workloads_are_sound_and_repeat(name):
    workload = GENERATED[name]()
    workload.check()
    assert workload.name == name
    assert workload == GENERATED[name]()


def test_few_shot_questions_share_exactly_their_tasks_examples():
    requests = few_shot(num_tasks=3, num_questions=4, num_shared_tokens=50).requests
    assert len(requests) == 12
    for one in requests:
        for other in requests:
            if one is not other:
                assert common(one.prompt_ids, other.prompt_ids) == (50 if one.label == other.label else 0)


def test_tree_nodes_go_on_with_their_parents_text():
    requests = tree_of_thought(num_trees=2, branching=3, depth=2).requests
    assert len(requests) == 2 * (1 + 3 + 9)
    for node in requests:
        if node.parent is None:
            continue
        before = requests[node.parent].prompt_ids + requests[node.parent].output_ids
        assert node.prompt_ids[: len(before)] == before
        assert len(node.prompt_ids) > len(before)


def test_turns_of_a_chat_go_on_with_all_that_was_said():
    requests = multi_turn(num_chats=3, num_turns=4).requests
    assert sum(item.parent is None for item in requests) == 3
    assert all(
        requests[item.parent].prompt_ids + requests[item.parent].output_ids
        == item.prompt_ids[: len(requests[item.parent].prompt_ids + requests[item.parent].output_ids)]
        for item in requests
        if item.parent is not None
    )
    assert len({tuple(item.prompt_ids[:200]) for item in requests}) == 1


def test_popularity_of_groups_falls_with_their_rank():
    requests = zipf(num_groups=10, num_requests=500).requests
    counts = [sum(item.label == f"group {group}" for item in requests) for group in range(10)]
    assert counts[0] > 2 * counts[3] > 0
    assert counts[0] > 4 * counts[9]
    assert [item.arrival_s for item in requests] == sorted(item.arrival_s for item in requests)


def test_prompts_without_sharing_differ_in_their_first_token():
    requests = no_sharing(num_requests=50).requests
    assert len({item.prompt_ids[0] for item in requests}) == 50


def test_a_limit_is_a_power_of_two_above_the_output():
    assert [request([1], [0] * count).max_tokens for count in (0, 15, 16, 100)] == [16, 16, 32, 128]


def test_leaving_out_a_long_request_leaves_out_its_children():
    requests = (
        request([0]),
        request(range(100)),
        request([1], parent=1),
        request([2], parent=0),
        request([3], parent=3),
    )
    fitting = few_shot().__class__("made", requests).fitting(50)
    assert [(item.prompt_ids[0], item.parent) for item in fitting.requests] == [(0, None), (2, 0), (3, 1)]
    fitting.check()


def test_a_child_before_its_parent_is_refused():
    with pytest.raises(InvariantViolation, match="request 0"):
        few_shot().__class__("made", (request([1], parent=0),)).check()


# -- recorded ------------------------------------------------------------------------------------------------


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def text_of(token_ids):
    return bytes(token_ids.tolist()).decode()


TRACE = [
    {"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]},
    {"timestamp": 0, "input_length": 1030, "output_length": 0, "hash_ids": [7, 8, 5]},
    {"timestamp": 2000, "input_length": 600, "output_length": 2, "hash_ids": [7, 9]},
]


def test_hash_ids_become_runs_of_512_tokens_and_the_last_is_cut(tmp_path):
    requests = read_workload(write_lines(tmp_path / "trace.jsonl", TRACE)).requests
    assert [item.arrival_s for item in requests] == [0.0, 0.5, 2.0]
    assert [len(item.prompt_ids) for item in requests] == [1030, 700, 600]
    assert common(requests[0].prompt_ids, requests[1].prompt_ids) == 512
    assert common(requests[1].prompt_ids, requests[2].prompt_ids) == 600
    assert [len(item.output_ids) for item in requests] == [0, 3, 2]
    tokens = [token for item in requests for token in item.output_ids]
    assert len(set(tokens)) == 5
    assert not set(tokens) & {token for item in requests for token in item.prompt_ids}


def test_a_limit_reads_the_first_lines_only(tmp_path):
    path = write_lines(tmp_path / "trace.jsonl", TRACE)
    assert len(read_workload(path, max_requests=2).requests) == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "line 1"),
        ("[1]", "not a JSON object"),
        ('{"a": 1}', "input_length"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "1 hash ids for 513"),
        ('{"timestamp": 0, "output_length": 1, "hash_ids": [1]}', "input_length"),
    ],
)
def test_broken_traces_are_refused_by_line(tmp_path, text, match):
    path = tmp_path / "trace.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(InvalidRequest, match=match):
        read_workload(path)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nothing\.jsonl"):
        read_workload(tmp_path / "nothing.jsonl")


def test_agent_calls_follow_on_their_sessions_last(tmp_path, monkeypatch):
    monkeypatch.setenv("RADIXRT_HOME", str(tmp_path / "empty"))
    lines = [
        {"timestamp": 20, "input": "hello there", "output": "b", "session_id": "one"},
        {"timestamp": 10, "input": "hello", "output": "a", "session_id": "one"},
        {"timestamp": 15, "input": "", "output": "c", "session_id": "one"},
        {"timestamp": 5, "input": "other", "output": "", "session_id": "two"},
    ]
    requests = read_workload(write_lines(tmp_path / "log.jsonl", lines)).requests
    assert [text_of(item.prompt_ids) for item in requests] == ["hello", "other", "hello there"]
    assert [item.parent for item in requests] == [None, None, 0]


def test_questions_follow_the_solved_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("RADIXRT_HOME", str(tmp_path / "empty"))
    write_lines(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": f"a{i}"} for i in range(20)])
    write_lines(tmp_path / "test.jsonl", [{"question": f"Q{i}", "answer": f"A{i}"} for i in range(5)])
    requests = read_workload(tmp_path).requests
    assert len(requests) == 5
    text = text_of(requests[3].prompt_ids)
    assert text.startswith("Question: q0\nAnswer: a0\n\n")
    assert "q7" in text
    assert "q8" not in text
    assert text.endswith("Question: Q3\nAnswer:")
    assert requests[3].output_ids == encode_bytes("A3")


# -- optimum -------------------------------------------------------------------------------------------------


def test_infinite_pool_computes_each_distinct_prefix_once():
    requests = [request([1, 2, 3, 4]), request([1, 2, 5]), request([1, 2, 3, 4]), request([1, 2])]
    # 13 prompt tokens, 5 distinct prefixes, one more for each of the last two: all of them is there.
    assert infinite_pool_tokens(requests) == 13 - 5 - 2


def test_infinite_pool_counts_outputs_that_later_prompts_go_on_with():
    assert infinite_pool_tokens([request([1, 2], [3, 4]), request([1, 2, 3, 4, 5])]) == 4
    assert infinite_pool_tokens([request([1, 2, 3, 4, 5]), request([1, 2], [3, 4])]) == 1


def test_belady_with_room_for_all_is_the_infinite_pool_by_pages():
    requests = few_shot(num_tasks=4, num_questions=5, num_shared_tokens=64).requests
    assert belady_tokens(requests, num_pages=10_000, page_size=16) == infinite_pool_tokens(requests)


def test_belady_keeps_what_is_needed_again_soonest():
    fresh = FreshTokens()
    one, two, three = (fresh.take(4) for _ in range(3))
    tail = [fresh.take(1) for _ in range(6)]
    order = [one, two, three, one, two, three]
    requests = [request(prompt + end) for prompt, end in zip(order, tail, strict=True)]
    # Room for two of three: least recently used would hit nothing; `one` stays, then `two` or `three`.
    assert belady_tokens(requests, num_pages=2, page_size=4) == 8
    assert belady_tokens(requests, num_pages=3, page_size=4) == 12


def test_burst_shares_one_prefix():
    requests = burst(num_requests=5, num_shared_tokens=100, num_own_tokens=7).requests
    assert all(common(requests[0].prompt_ids, item.prompt_ids) == 100 for item in requests[1:])
