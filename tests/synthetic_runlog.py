"""A made-up training run for the tests of the reports: small, seeded, and consistent in itself.

Experts of which some run in each step pass through a fast tier of fixed size. What a prediction
names is fetched beside the block before it, all else while the step waits; the oldest leaves.
"""

from __future__ import annotations

import math
import random

from rapidfuzz.distance import Levenshtein

from dynoffload.telemetry import (
    MemorySample,
    PhaseSpan,
    RunLog,
    Stall,
    StepBlocks,
    StepStats,
    Transfer,
)

MB = 1_000_000
READ_BPS, WRITE_BPS = 3.2e9, 4.5e9
_WRONG = 0.06  # share of the experts that is mispredicted


def synthetic_log(
    steps: int = 24,
    *,
    layers: int = 6,
    experts: int = 8,
    policy: str = "pilot",
    model: str = "MoELanguageModel",
) -> RunLog:
    """Return the log of ``steps`` steps by ``policy``."""
    rng = random.Random(0)
    log = RunLog(model, "pager", policy, budget=320 * MB, headroom=64 * MB)
    resident: dict[str, int] = {}  # the oldest first
    now, last = 0.0, None
    for step in range(steps):
        begin, firsts = now, (len(log.stalls), len(log.transfers), len(log.memory))
        actual = _order(layers, experts, rng)
        predicted = _predicted(actual, last, policy, experts, rng) if step else None
        used = 0
        for phase, order in (("forward", actual), ("backward", actual[::-1])):
            start, known = now, set(predicted or ())
            for place, name in enumerate(order):
                if name not in resident:
                    end = _fetch(log, resident, name, now, "fault")
                    log.stalls.append(Stall(now, end, name))
                    now = end
                resident[name] = resident.pop(name)
                following = order[place + 1] if place + 1 < len(order) else name
                if following in known and following not in resident:
                    _fetch(log, resident, following, now, "plan")
                    used += resident[following]
                now += (0.011 if "experts" in name else 0.016) * rng.uniform(0.95, 1.08)
            if predicted and rng.random() < 0.5:  # and what nobody uses
                _fetch(log, resident, f"spare.{step}.{phase}", now, "plan")
            log.phases.append(PhaseSpan(start, now, step, phase))
        log.phases.append(PhaseSpan(now, now + 0.03, step, "optimizer"))
        now += 0.03
        stalls, transfers = log.stalls[firsts[0] :], log.transfers[firsts[1] :]
        read, written, ahead = (
            sum(one.nbytes for one in transfers if word in (one.kind, one.cause))
            for word in ("fetch", "evict", "plan")
        )
        score = Levenshtein.normalized_similarity(predicted, actual) if predicted else math.nan
        log.blocks.append(StepBlocks(step, predicted, actual))
        log.steps.append(
            StepStats(
                step,
                now - begin,
                len(stalls),
                sum((one.end - one.start for one in stalls), 0.0),
                read,
                written,
                ahead,
                used,
                ahead - used,
                score,
                max(sample.fast_bytes for sample in log.memory[firsts[2] :]),
            )
        )
        last = actual
    return log


def _fetch(log: RunLog, resident: dict[str, int], name: str, now: float, cause: str) -> float:
    """Bring a region, and let the oldest make room; return when it is there."""
    size = (25 if "experts" in name else 17 if "." in name else 34) * MB
    while sum(resident.values()) + size > log.budget:
        oldest = next(iter(resident))
        gone = resident.pop(oldest)
        log.transfers.append(Transfer(now, now + gone / WRITE_BPS, "evict", oldest, gone, "room"))
    resident[name] = size
    end = now + size / READ_BPS
    log.transfers.append(Transfer(now, end, "fetch", name, size, cause))
    fast = sum(resident.values())
    log.memory.append(MemorySample(now, fast, fast + 310 * MB))
    return end


def _order(layers: int, experts: int, rng: random.Random) -> tuple[str, ...]:
    order = ["embed"]
    for layer in range(layers):
        order.append(f"layers.{layer}.attention")
        hit = sorted(rng.sample(range(experts), rng.randint(2, min(6, experts))))
        order += [f"layers.{layer}.experts.{e}" for e in hit]
    return (*order, "head")


def _predicted(
    actual: tuple[str, ...],
    last: tuple[str, ...] | None,
    policy: str,
    experts: int,
    rng: random.Random,
) -> tuple[str, ...] | None:
    if policy != "pilot":
        return last if policy == "repeat" else None
    guess = [
        f"{name.rpartition('.')[0]}.{rng.randrange(experts)}"
        if "experts" in name and rng.random() < _WRONG
        else name
        for name in actual
    ]
    return tuple(dict.fromkeys(guess))
