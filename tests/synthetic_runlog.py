"""A made-up training run for the tests of the reports: small, seeded, and consistent in itself.

Experts of which some run in each step. What the last order predicted is fetched ahead, all else
while the step waits.
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
REGION = 25 * MB


def synthetic_log(
    steps: int = 24,
    *,
    layers: int = 6,
    policy: str = "pilot",
    model: str = "MoELanguageModel",
) -> RunLog:
    """Return the log of ``steps`` steps by ``policy``."""
    rng = random.Random(0)
    log = RunLog(model, "pager", policy, budget=320 * MB, headroom=64 * MB)
    now, last = 0.0, None
    for step in range(steps):
        begin, stalls, transfers = now, len(log.stalls), len(log.transfers)
        experts = [sorted(rng.sample(range(8), rng.randint(2, 6))) for _ in range(layers)]
        actual = ("embed", *(f"layers.{n}.experts.{e}" for n in range(layers) for e in experts[n]))
        predicted = None if policy == "on-demand" else last
        known, peak = set(predicted or ()), 0
        for phase, order in (("forward", actual), ("backward", actual[::-1])):
            start = now
            for name in order:
                end = now + rng.uniform(0.006, 0.009)
                cause = "plan" if name in known else "fault"
                log.transfers.append(
                    Transfer(now, now + 0.005, "evict", f"old.{name}", REGION, "room")
                )
                log.transfers.append(Transfer(now, end, "fetch", name, REGION, cause))
                fast = rng.randint(200 * MB, log.budget)
                log.memory.append(MemorySample(now, fast, fast + 310 * MB))
                peak = max(peak, fast)
                if name not in known:
                    log.stalls.append(Stall(now, end, name))
                    now = end
                now += rng.uniform(0.01, 0.012)
            log.phases.append(PhaseSpan(start, now, step, phase))
        log.phases.append(PhaseSpan(now, now + 0.03, step, "optimizer"))
        now += 0.03
        waited = [one.end - one.start for one in log.stalls[stalls:]]
        moved = log.transfers[transfers:]
        read = REGION * sum(one.kind == "fetch" for one in moved)
        ahead = REGION * sum(one.cause == "plan" for one in moved)
        used = ahead - ahead // 20
        score = Levenshtein.normalized_similarity(predicted, actual) if predicted else math.nan
        log.blocks.append(StepBlocks(step, predicted, actual))
        numbers = (now - begin, len(waited), sum(waited, 0.0), read, read, ahead, used)
        log.steps.append(StepStats(step, *numbers, ahead - used, score, peak))
        last = actual
    return log
