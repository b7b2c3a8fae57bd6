"""Branches share a prefix, run side by side and keep their own outcomes."""

import re

import pytest

from frontend_lang import Err, Ok, ProgramError, assistant, gen, program, user
from tests.support.backends import ScriptedBackend
from tests.support.threads import NewThreads

pytestmark = pytest.mark.timeout(60)


def test_children_share_the_exact_prefix_and_run_side_by_side():
    @program
    def forked(s):
        s += "shared "
        branches = s.fork(3)
        for index, branch in enumerate(branches):
            branch += f"{index}:" + gen("x")
        return [branch["x"] for branch in branches], [branch.text() for branch in branches]

    backend = ScriptedBackend(["p", "q", "r"], delay_s=0.02)
    result = forked.with_options(backend=backend).run()
    assert result.value == (["p", "q", "r"], ["shared 0:p", "shared 1:q", "shared 2:r"])
    assert backend.most_running == 3
    prefix = result.token_ids()
    assert [request.prompt_ids[: len(prefix)] for request in backend.requests] == [prefix] * 3
    assert [call.branch for call in result.calls] == ["root/0", "root/1", "root/2"]


def test_a_fork_does_not_wait_and_children_see_the_parents_variables():
    @program
    def forked(s):
        s += gen("a")
        [child] = s.fork(1)
        child += gen("b")
        s += "parent" + gen("c")
        return child["a"], child["b"], "b" in s, "c" in child

    backend = ScriptedBackend(lambda request, prompt: request.label.upper(), delay_s=0.01)
    assert forked.with_options(backend=backend).run().value == ("A", "B", False, False)


def test_outcomes_stay_in_place_when_a_child_fails():
    @program
    def forked(s):
        branches = s.fork(4)
        for branch in branches:
            branch += gen("x")
        outcomes = branches.join()
        return [type(outcome) for outcome in outcomes], [
            outcome["x"] if outcome.is_ok else str(outcome.error) for outcome in outcomes
        ]

    result = forked.with_options(backend=ScriptedBackend(["a", "b", "c", "d"], fail_at={1})).run()
    kinds, values = result.value
    assert kinds == [Ok, Err, Ok, Ok]
    assert values[0] == "a"
    assert values[2:] == ["c", "d"]
    assert 'gen("x") failed' in values[1]


def test_each_child_raises_its_own_error():
    @program
    def forked(s):
        branches = s.fork(3)
        for index, branch in enumerate(branches):
            branch += gen(f"x{index}")
        with pytest.raises(ProgramError) as caught:
            branches[1]["x1"]
        assert caught.value.call == "x1"
        return branches[0]["x0"] + branches[2]["x2"]

    assert forked.with_options(backend=ScriptedBackend(["a", "b", "c"], fail_at={1})).run().value == "ac"


def test_a_failure_that_nobody_looked_at_is_raised_at_the_end():
    @program
    def joined(s):
        branches = s.fork(2)
        branches += gen("x")
        branches.join()
        return branches[0]["x"]

    @program
    def unjoined(s):
        branches = s.fork(2)
        branches += gen("x")

    for each in (joined, unjoined):
        with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
            each.with_options(backend=ScriptedBackend(["a"], fail_at={1})).run()


def test_failures_that_look_alike_are_told_one_by_one():
    @program
    def forked(s):
        branches = s.fork(3)
        branches += gen("x")
        with pytest.raises(ProgramError):
            branches[0]["x"]
        with pytest.raises(ProgramError):
            branches[0]["x"]

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed') as caught:
        forked.with_options(backend=ScriptedBackend(fail_at={0, 1, 2})).run()
    assert len(caught.value.__notes__) == 1  # the third child's


def test_a_parent_that_fails_before_the_fork_fails_its_children():
    @program
    def forked(s):
        s += gen("a")
        branches = s.fork(2)
        branches += gen("x")
        late = s.fork(1)
        with pytest.raises(ProgramError, match=r'"x" has no value: gen\("a"\) failed'):
            branches[0]["x"]
        with pytest.raises(ProgramError, match=r'gen\("a"\) failed'):
            late[0].text()
        again = s.fork(1)
        again += gen("y")
        with pytest.raises(ProgramError, match=r'"y" has no value: gen\("a"\) failed'):
            again[0]["y"]

    forked.with_options(backend=ScriptedBackend(fail_at={0})).run()


def test_a_second_fork_with_the_same_names_has_its_own_values():
    @program
    def twice(s):
        first = s.fork(2)
        first += gen("x")
        first.join()
        second = s.fork(2)
        second += gen("x")
        second.join()
        return [branch["x"] for branch in [*first, *second]]

    result = twice.with_options(backend=ScriptedBackend(list("abcd"))).run()
    assert result.value == list("abcd")
    assert [call.branch for call in result.calls] == [f"root/{index}" for index in range(4)]


def test_forks_nest():
    @program
    def nested(s):
        for branch in s.fork(2):
            for leaf in branch.fork(2):
                leaf += gen("x")

    result = nested.with_options(backend=ScriptedBackend()).run()
    assert sorted(call.branch for call in result.calls) == ["root/0/0", "root/0/1", "root/1/0", "root/1/1"]


def test_branches_take_one_item_each_or_a_function_of_the_index():
    @program
    def forked(s):
        branches = s.fork(2)
        branches += "-"
        branches += ["a", "b"]
        branches += lambda index: str(index)
        branches[0] += "!"
        branches += gen("x")
        with pytest.raises(ValueError, match="2 branches take a list of 2 items, got 1"):
            branches += ["a"]
        with pytest.raises(TypeError, match="branches take text"):
            branches += 5
        with pytest.raises(TypeError, match="cannot be replaced"):
            branches[0] = s
        return [branch.text() for branch in branches[:]]

    assert forked.with_options(backend=ScriptedBackend(["x"])).run().value == ["-a0!x", "-b1x"]


@pytest.mark.parametrize("n", [0, -1, True, 1.5, None])
def test_the_number_of_branches_is_checked(n):
    @program
    def forked(s):
        s.fork(n)

    with pytest.raises(ValueError, match="at least 1, got"):
        forked.with_options(backend=ScriptedBackend()).run()


def test_a_fork_block_joins_at_its_end():
    @program
    def forked(s):
        with s.fork(2) as branches:
            branches += gen("x")
        assert backend.running == 0
        s += branches[0]["x"]

    backend = ScriptedBackend(["x"], delay_s=0.01)
    assert forked.with_options(backend=backend).run().text() == "x"


def test_a_branch_forked_inside_a_message_ends_it_by_the_next():
    @program
    def forked(s):
        with s.user():
            s += "Tip "
            for branch in s.fork(2):
                branch += "more"
                branch += assistant(gen("x"))
        s += assistant(gen("y"))

    backend = ScriptedBackend()
    forked.with_options(backend=backend).run()
    prompts = [backend.decode(request.prompt_ids) for request in backend.requests]
    assert prompts.count("system\nHelp.\nuser\nTip more\nassistant\n") == 2
    assert prompts.count("system\nHelp.\nuser\nTip \nassistant\n") == 1


def test_a_hundred_forking_programs_need_no_thread_of_their_own():
    threads, most_threads = NewThreads(), 0

    def answer(request, prompt):
        nonlocal most_threads
        most_threads = max(most_threads, len(threads.names()))
        return "tip"

    @program
    def tips(s, topic):
        s += user(f"Write about {topic}")
        branches = s.fork(4)
        for index, branch in enumerate(branches):
            branch += user(f"Tip {index}?") + assistant(gen("tip"))
        s += user("".join(branch["tip"] for branch in branches))
        s += assistant(gen("summary"))

    backend = ScriptedBackend(answer, delay_s=0.001)
    outcomes = tips.with_options(backend=backend).map(
        [(str(index),) for index in range(100)], max_concurrency=100
    )
    assert all(outcome.is_ok for outcome in outcomes)
    assert backend.num_calls == 500
    assert backend.most_running > 100
    assert most_threads <= 1
    assert not threads.names()


def test_cancelled_branches_stop_at_once_and_are_the_programs_to_handle():
    @program
    def raced(s):
        branches = s.fork(3)
        for index, branch in enumerate(branches):
            branch += gen("x")
            branch += gen("y")
            for leaf in branch.fork(2) if index else ():
                leaf += gen("z")
        first, *_ = [branch["x"] for branch in branches]  # all are at their second call now
        branches.cancel()
        with pytest.raises(
            ProgramError, match=r'gen\("y"\) failed at .*RequestAborted: the branch was cancelled'
        ):
            branches[1]["y"]
        with pytest.raises(ProgramError):
            branches[2].text()
        s += "on " + gen("late")
        return first, s["late"], [branch["x"] for branch in branches]

    backend = ScriptedBackend(lambda request, prompt: request.label, delay_s=0.02)
    assert raced.with_options(backend=backend).run().value == ("x", "late", ["x"] * 3)
    assert backend.running == 0
    assert backend.aborted == backend.num_calls - 4
    assert backend.open_scopes == set()


def test_leaving_a_fork_block_by_an_exception_cancels_its_branches():
    @program
    def left(s):
        try:
            with s.fork(2) as branches:
                branches += gen("x")
                raise KeyError("mine")
        except KeyError:
            return "handled"

    backend = ScriptedBackend(delay_s=30)
    assert left.with_options(backend=backend).run().value == "handled"
    assert (backend.running, backend.open_scopes) == (0, set())


def test_a_role_block_left_by_an_exception_ends_its_message():
    @program
    def left(s):
        try:
            with s.user():
                s += "half"
                raise KeyError("mine")
        except KeyError:
            s += assistant(gen("x"))
        return s.messages()

    messages = left.with_options(backend=ScriptedBackend()).run().value
    assert messages == [{"role": "user", "content": "half"}, {"role": "assistant", "content": "ok"}]


def test_text_alone_can_be_read_in_an_async_program_without_waiting():
    @program
    async def reading(s):
        s += "just text"
        return s.text(), s.token_ids()

    text, token_ids = reading.with_options(backend=ScriptedBackend()).run().value
    assert (text, len(token_ids)) == ("just text", 10)


def test_branches_share_the_tokens_of_their_prefix_whatever_they_append():
    class Merging(ScriptedBackend):
        """A tokenizer in which "ab" is one token."""

        def encode(self, pieces, *, is_start=False):
            text = "".join(piece.text for piece in pieces)
            self.encoded.append(list(pieces))
            return [900 if part == "ab" else ord(part) for part in re.findall("ab|.", text)]

    @program
    def forked(s):
        s += "xa"
        first, second = branches = s.fork(2)
        first += "b" + gen("y")
        second += "c" + gen("y")
        branches.join()

    backend = Merging()
    result = forked.with_options(backend=backend).run()
    assert [call.prompt_ids[:3] for call in result.calls] == [(0, ord("x"), ord("a"))] * 2
