"""A made-up training run for the tests of the reports: small, seeded, and consistent in itself.

It plays a mixture-of-experts network through a fast tier of fixed size: one reader and one writer
of given bandwidth, prefetch by a prediction that is wrong at times, stalls where a fetch comes too
late. So memory follows from the transfers, stalls from the fetches and the steps from both, as in
a real session. It is loaded by path (`tests` is no package).
"""

from __future__ import annotations

import math
import random
from collections import deque

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


def levenshtein(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


class _Machine:
    """The clock, the fast tier and the two transfer directions of one made-up session."""

    def __init__(self, log: RunLog, sizes: dict[str, int], rng: random.Random) -> None:
        self.log, self.sizes, self.rng = log, sizes, rng
        self.now = self.reader_free = self.writer_free = 0.0
        self.resident: dict[str, float] = {}  # region -> when its fetch ends
        self.ahead: set[str] = set()  # prefetched and not used yet
        self.used_bytes = self.wasted_bytes = self.bytes_in = self.bytes_out = self.prefetched = 0
        self.peak = 0

    @property
    def fast_bytes(self) -> int:
        return sum(self.sizes[name] for name in self.resident)

    def sample(self, time: float) -> None:
        fast = self.fast_bytes
        self.peak = max(self.peak, fast)
        noise = int(self.rng.uniform(0, 30 * MB))
        self.log.memory.append(MemorySample(time, fast, fast + 310 * MB + noise))

    def evict(self, name: str, cause: str) -> float:
        size = self.sizes[name]
        start = max(self.now, self.writer_free, self.resident.pop(name))
        self.writer_free = end = start + size / WRITE_BPS
        self.log.transfers.append(Transfer(start, end, "evict", name, size, cause))
        self.bytes_out += size
        if name in self.ahead:
            self.ahead.discard(name)
            self.wasted_bytes += size
        return end

    def make_room(self, size: int, keep: set[str], *, force: bool) -> bool:
        while self.fast_bytes + size > self.log.budget:
            victims = [name for name in self.resident if name not in keep]
            if not victims:
                assert not force, "the made-up network does not fit its budget"
                return False
            self.evict(victims[0], "room")
        return True

    def fetch(self, name: str, cause: str, keep: set[str]) -> bool:
        if not self.make_room(self.sizes[name], keep, force=cause == "fault"):
            return False
        start = max(self.now, self.reader_free)
        self.reader_free = end = start + self.sizes[name] / READ_BPS
        self.resident[name] = end
        self.log.transfers.append(Transfer(start, end, "fetch", name, self.sizes[name], cause))
        self.bytes_in += self.sizes[name]
        if cause == "plan":
            self.prefetched += self.sizes[name]
            self.ahead.add(name)
        return True

    def use(self, name: str, seconds: float, upcoming: list[str]) -> tuple[int, float]:
        """Run one block; return how often and for how long it waited."""
        keep = {name, *upcoming[:3]}
        stalls, stalled = 0, 0.0
        if name not in self.resident:
            self.fetch(name, "fault", {name})
        ready = self.resident[name]
        if ready > self.now:
            self.log.stalls.append(Stall(self.now, ready, name))
            stalls, stalled = 1, ready - self.now
            self.now = ready
        if name in self.ahead:
            self.ahead.discard(name)
            self.used_bytes += self.sizes[name]
        self.resident[name] = self.resident.pop(name)  # most recently used last
        for following in upcoming[:6]:
            if following not in self.resident and not self.fetch(following, "plan", keep):
                break
        self.sample(self.now)
        self.now += seconds * self.rng.uniform(0.95, 1.08)
        self.sample(self.now)
        return stalls, stalled


def synthetic_log(
    steps: int = 24,
    *,
    layers: int = 6,
    experts: int = 8,
    seed: int = 0,
    policy: str = "pilot",
    wrong: float = 0.06,
    model: str = "MoELanguageModel",
) -> RunLog:
    """Return the log of ``steps`` steps; a share ``wrong`` of the experts is mispredicted."""
    rng = random.Random(seed)
    sizes = {"embed": 34 * MB, "head": 34 * MB}
    for layer in range(layers):
        sizes[f"layers.{layer}.attention"] = 17 * MB
        sizes.update({f"layers.{layer}.experts.{e}": 25 * MB for e in range(experts)})
    log = RunLog(model, "pager", policy, budget=320 * MB, headroom=64 * MB)
    machine = _Machine(log, sizes, rng)
    last_order: tuple[str, ...] | None = None
    for step in range(steps):
        begin = machine.now
        machine.peak = 0
        machine.used_bytes = machine.wasted_bytes = machine.prefetched = 0
        machine.bytes_in = machine.bytes_out = 0
        actual = _order(layers, experts, rng)
        predicted = _predict(actual, last_order, policy, step, wrong, experts, rng)
        stalls, stalled = 0, 0.0
        for phase, order in (("forward", actual), ("backward", actual[::-1])):
            start = machine.now
            plan = predicted if phase == "forward" else (actual[::-1] if predicted else None)
            queue = deque(plan or ())
            for name in order:
                if name in queue:
                    while queue.popleft() != name:
                        pass
                seconds = (0.011 if "experts" in name else 0.016) * (1 + (phase == "backward"))
                count, time = machine.use(name, seconds, list(queue)[:6])
                stalls, stalled = stalls + count, stalled + time
            log.phases.append(PhaseSpan(start, machine.now, step, phase))
        start = machine.now
        machine.now += 0.03
        log.phases.append(PhaseSpan(start, machine.now, step, "optimizer"))
        score = math.nan
        if predicted is not None:
            score = 1 - levenshtein(predicted, actual) / max(len(predicted), len(actual))
        log.blocks.append(StepBlocks(step, predicted, actual))
        log.steps.append(
            StepStats(
                step,
                machine.now - begin,
                stalls,
                stalled,
                machine.bytes_in,
                machine.bytes_out,
                machine.prefetched,
                machine.used_bytes,
                machine.wasted_bytes,
                score,
                machine.peak,
            )
        )
        last_order = actual
    return log


def _order(layers: int, experts: int, rng: random.Random) -> tuple[str, ...]:
    order = ["embed"]
    for layer in range(layers):
        order.append(f"layers.{layer}.attention")
        hit = sorted(rng.sample(range(experts), rng.randint(2, min(6, experts))))
        order += [f"layers.{layer}.experts.{e}" for e in hit]
    return (*order, "head")


def _predict(
    actual: tuple[str, ...],
    last: tuple[str, ...] | None,
    policy: str,
    step: int,
    wrong: float,
    experts: int,
    rng: random.Random,
) -> tuple[str, ...] | None:
    if policy == "on-demand" or step == 0:
        return None
    if policy == "repeat":
        return last
    guess: list[str] = []
    for name in actual:
        chance = rng.random() if "experts" in name else 1.0
        if chance < wrong / 3:
            continue
        if chance < wrong:
            layer = name.rsplit(".", 1)[0]
            other = f"{layer}.{rng.randrange(experts)}"
            if other not in guess:
                guess.append(other)
            continue
        if name not in guess:
            guess.append(name)
    return tuple(guess)
