"""A made-up training run for the tests of the reports: small, seeded, and consistent in itself.

Experts of which some run in each step. What ran in the step before is fetched ahead, all else while
the step waits.
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
    steps: int = 24, *, layers: int = 6, policy: str = "pilot", model: str = "MoELanguageModel"
) -> RunLog:
    """Return the log of ``steps`` steps by ``policy``."""
    rng = random.Random(0)
    log = RunLog(model, "pager", policy, budget=320 * MB, headroom=64 * MB)
    now, last = 0.0, None
    for step in range(steps):
        begin, stalls = now, len(log.stalls)
        actual = tuple(
            f"layers.{n}.experts.{e}" for n in range(layers) for e in rng.sample(range(8), 4)
        )
        predicted = None if policy == "on-demand" else last
        ahead = peak = 0
        for phase, order in (("forward", actual), ("backward", actual[::-1])):
            start = now
            for name in order:
                end, known = now + rng.uniform(0.006, 0.009), name in (predicted or ())
                cause, fast = "plan" if known else "fault", rng.randint(200 * MB, log.budget)
                log.transfers += [
                    Transfer(now, now + 0.005, "evict", f"old.{name}", REGION, "room"),
                    Transfer(now, end, "fetch", name, REGION, cause),
                ]
                log.memory.append(MemorySample(now, fast, fast + 310 * MB))
                ahead, peak = ahead + REGION * known, max(peak, fast)
                if not known:
                    log.stalls.append(Stall(now, end, name))
                    now = end
                now += 0.01
            log.phases.append(PhaseSpan(start, now, step, phase))
        log.phases.append(PhaseSpan(now, now + 0.03, step, "optimizer"))
        now += 0.03
        waited, read = log.stalls[stalls:], 2 * REGION * len(actual)
        score = Levenshtein.normalized_similarity(predicted, actual) if predicted else math.nan
        log.blocks.append(StepBlocks(step, predicted, actual))
        stall_s, used = sum((one.end - one.start for one in waited), 0.0), ahead - ahead // 20
        numbers = (now - begin, len(waited), stall_s, read, read, ahead, used)
        log.steps.append(StepStats(step, *numbers, ahead - used, score, peak))
        last = actual
    return log
