import random

from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens, pack
from radixrt.sched import prompts
from radixrt.sched.prompts import SortedPrompts
from radixrt.types import DEFAULT_NAMESPACE, Namespace

NAMESPACES = (DEFAULT_NAMESPACE, Namespace(salt="a"))


def random_tokens(rng):
    return pack([rng.randrange(2) for _ in range(rng.randrange(1, 9))])


def test_an_open_gap_gives_what_somebody_waits_for_now():
    num_kept = num_closed = 0
    for seed in range(10):
        rng = random.Random(seed)
        view, waiting, known = SortedPrompts(), {}, []
        for arrival in range(120):
            if waiting and rng.random() < 0.5:
                gone = rng.choice(list(waiting))
                view.remove(*waiting.pop(gone), gone)
            else:
                waiting[arrival] = (rng.choice(NAMESPACES), random_tokens(rng))
                view.add(*waiting[arrival], arrival, arrival)
            namespace, path = rng.choice(NAMESPACES), random_tokens(rng)
            known.append((namespace, path, view.gap(namespace, path)))
            for namespace, path, gap in known:
                shared = [
                    num_common_tokens(tokens, path) for at, tokens in waiting.values() if at == namespace
                ]
                if gap.is_open:
                    longest, num_before = max(shared, default=0), rng.randrange(len(path) // TOKEN_BYTES + 1)
                    assert gap.num_wanted(path) == longest, f"seed {seed}"
                    num_more = gap.num_wanted(path, num_before=num_before)
                    assert num_more == max(longest - num_before, 0), f"seed {seed}"
            num_kept += sum(gap.is_open for *_, gap in known[:-1])
            num_closed += sum(not gap.is_open for *_, gap in known)
            known = [row for row in known if row[2].is_open]
            assert sorted(view) == sorted(waiting)
    assert num_kept > 1000
    assert num_closed > 1000


def test_all_of_a_long_path_is_wanted(monkeypatch):
    monkeypatch.setattr(prompts, "MAX_KEY_TOKENS", 4)
    view = SortedPrompts()
    view.add(DEFAULT_NAMESPACE, pack([1, 2, 3, 4]), 0, "first four tokens of a long prompt")
    assert view.gap(DEFAULT_NAMESPACE, pack([1, 2, 3, 9])).num_wanted(pack([1, 2, 3, 9])) == 3
    assert view.gap(DEFAULT_NAMESPACE, pack([1, 2, 3, 4, 5, 6])).num_wanted(pack([1, 2, 3, 4, 5, 6])) == 6
    for num_before in range(7):
        gap = view.gap(DEFAULT_NAMESPACE, pack([1, 2, 3, 4, 5, 6]))
        assert gap.num_wanted(pack([1, 2, 3, 4, 5, 6]), num_before=num_before) == 6 - num_before


def test_walks_begin_at_the_nearest_and_go_both_ways():
    view = SortedPrompts()
    for arrival, tokens in enumerate(([1, 1], [1, 3], [1, 5, 5], [2])):
        view.add(DEFAULT_NAMESPACE, pack(tokens), arrival, arrival)
    rows, place = view.place(DEFAULT_NAMESPACE, pack([1, 5]))
    down, up = [row[2] for row in rows[:place][::-1]], [row[2] for row in rows[place:]]
    assert down == [1, 0]
    assert up == [2, 3]
