"""h-DTR: which saved tensor to drop when there is no room.

What it is: the published heuristic (Kirisame et al., ICLR 2021), with the exact neighbourhood. The
score of a tensor is c / (m · s): seconds c to make it again, with all its dropped neighbourhood e*
(dropped ancestors that would have to be made first, and dropped descendants that would need it);
its bytes m; seconds s since it was last used. The lowest leaves first. What it is not: a plan; it
knows nothing of what comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from dynoffload.runtime.recompute.records import Operator, Record

_AT_LEAST_S = 1e-9


def cost(record: Record) -> float:
    """Return the seconds to make ``record`` and its dropped neighbourhood again."""
    operator = record.operator
    assert operator is not None, "roots are never dropped"
    seen: set[Operator] = {operator}
    for neighbours in (_sources, _results):
        ahead = list(neighbours(record))
        while ahead:
            other = ahead.pop()
            if other.operator is None or other.operator in seen or other.here() is not None:
                continue
            seen.add(other.operator)
            ahead += neighbours(other)
    return sum(one.seconds for one in seen)


def _sources(record: Record) -> Iterable[Record]:
    return () if record.operator is None else record.operator.inputs


def _results(record: Record) -> Iterator[Record]:
    for reference in record.users:
        user = reference()
        if user is not None:
            yield from user.made()


def in_order(records: Iterable[Record], now: float) -> Iterator[Record]:
    """Yield ``records`` as they should be dropped, each time the lowest score.

    The caller drops what it is given before it asks for the next. By that the scores of the others
    can only rise, so one that is lowest still when it is reckoned anew is the lowest of all.
    """
    heap = [(_score(record, now), number, record) for number, record in enumerate(records)]
    heapq.heapify(heap)
    while heap:
        _, number, record = heap[0]
        score = _score(record, now)
        if len(heap) > 1 and score > min(heap[1:3])[0]:
            heapq.heapreplace(heap, (score, number, record))
            continue
        heapq.heappop(heap)
        yield record


def _score(record: Record, now: float) -> float:
    return cost(record) / (record.nbytes * max(now - record.used_at, _AT_LEAST_S))
