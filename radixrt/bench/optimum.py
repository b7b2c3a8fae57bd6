"""What no cache can beat: hit rates with an infinite pool, and with perfect eviction in a given pool.

Both take the requests one after another in the order of the workload, parents before children.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from radixrt.bench.workloads import SimRequest
from radixrt.kv.packed import num_common_tokens
from radixrt.types import Namespace

NEVER = 1 << 62


class _SortedPrefixes:
    """Packed runs in sorted order: the longest common prefix with any of them is that with a neighbour."""

    def __init__(self) -> None:
        self._runs: list[bytes] = []

    def num_common(self, run: bytes) -> int:
        place = bisect_left(self._runs, run)
        return max(
            (num_common_tokens(other, run) for other in self._runs[max(place - 1, 0) : place + 1]), default=0
        )

    def add(self, run: bytes) -> None:
        self._runs.insert(bisect_left(self._runs, run), run)


def infinite_pool_tokens(requests: Sequence[SimRequest]) -> int:
    """Give the prompt tokens that come from the cache when nothing is ever evicted. Pure.

    A request takes its longest common prefix with all that stands before it, prompts and outputs, but for its last
    token: one is always computed. Over prompts alone this does not depend on the order: it is the sum of their
    lengths less the number of distinct prefixes, less one per prompt that another one begins with or equals.
    """
    seen: dict[Namespace, _SortedPrefixes] = {}
    num_cached = 0
    for request in requests:
        prefixes = seen.setdefault(request.namespace, _SortedPrefixes())
        run = (request.prompt_ids + request.output_ids).tobytes()
        num_prompt = len(request.prompt_ids)
        num_cached += min(prefixes.num_common(run), num_prompt - 1)
        prefixes.add(run)
    return num_cached


def belady_tokens(requests: Sequence[SimRequest], *, num_pages: int, page_size: int) -> int:
    """Give the prompt tokens that come from a pool of num_pages whole pages under perfect eviction. Pure.

    A page is named by all tokens up to its end. A request needs the pages of its prompt and output together, one
    request at a time; the page that is needed again last goes first (Belady 1966), of equals the deepest. An order
    of requests other than the workload's can do better, and so can hits inside a page.
    Cost: O(pages of all requests * log).
    """
    paths = _page_paths(requests, page_size)
    next_uses = _next_uses(paths)
    resident: dict[int, int] = {}  # page -> its next use
    queue: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, page); entries may be stale
    num_cached = 0
    for request, path, uses in zip(requests, paths, next_uses, strict=True):
        num_hits = next((depth for depth, page in enumerate(path) if page not in resident), len(path))
        num_cached += min(num_hits * page_size, len(request.prompt_ids) - 1)
        for depth, (page, use) in enumerate(zip(path, uses, strict=True)):
            resident[page] = use
            heapq.heappush(queue, (-use, -depth, page))
        current = set(path)
        kept = []
        while len(resident) > num_pages and queue:
            entry = heapq.heappop(queue)
            use, page = -entry[0], entry[2]
            if resident.get(page) != use:
                continue
            if page in current:
                kept.append(entry)
                continue
            del resident[page]
        for entry in kept:
            heapq.heappush(queue, entry)
    return num_cached


def _page_paths(requests: Sequence[SimRequest], page_size: int) -> list[list[int]]:
    """Name every whole page of every request by the tokens up to its end."""
    names: dict[tuple[object, bytes], int] = {}  # (page before it or namespace, its tokens) -> page
    paths = []
    for request in requests:
        packed = (request.prompt_ids + request.output_ids).tobytes()
        page_bytes = page_size * request.prompt_ids.itemsize
        before: object = request.namespace
        path = []
        for start in range(0, len(packed) // page_bytes * page_bytes, page_bytes):
            before = names.setdefault((before, packed[start : start + page_bytes]), len(names))
            path.append(before)
        paths.append(path)
    return paths


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Give for every use of a page the index of the request that uses it next, NEVER if none does."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        uses.append([upcoming.get(page, NEVER) for page in paths[index]])
        for page in paths[index]:
            upcoming[page] = index
    return uses[::-1]
