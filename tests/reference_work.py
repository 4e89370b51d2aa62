"""A fixed piece of work to weigh others against, so that no test depends on how fast a machine is.

The work is numpy calls on small arrays, as planning and prediction make them, of about a
millisecond. The time is the thread's own, which another process on the core does not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

_CALLS = 180
_TIMES = 5


def reference_work() -> float:
    """Do about a millisecond of small numpy calls and return a number that needs them all."""
    values = np.arange(256, dtype=np.float64)
    seen: dict[int, float] = {}
    for call in range(_CALLS):
        turned = np.roll(values, call)
        seen[call] = float(turned[turned > call].sum())
    return sum(seen.values())


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that this thread computes in ``work``."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def times_reference(work: Callable[[], object], rounds: int = 15) -> float:
    """Return how many times as long as `reference_work` a call of ``work`` takes: medians of both,
    measured in turns, after a call that does not count.

    The least of five such measurements: while others take the memory's bandwidth, or the whole
    machine, the two do not slow down alike.
    """
    seconds_of(work)
    return min(_ratio(work, rounds) for _ in range(_TIMES))


def _ratio(work: Callable[[], object], rounds: int) -> float:
    pairs = [(seconds_of(work), seconds_of(reference_work)) for _ in range(rounds)]
    return median(ours for ours, _ in pairs) / median(its for _, its in pairs)
