"""The largest that fits, found by trying: ways of training one network in so much memory.

What it is: `Way`, one way of training; `search`, which doubles a size and then halves the gap until
it is known what still trains, each try in a process and a memory cgroup of its own. What it is not:
a model of memory; nothing is computed, everything is tried. What a size is (layers, rows) is the
caller's business, tables and figures are those of `dynoffload.experiments.largest_views`.

[Note: what fits]  Every way has the same memory: what a process takes before there is a network,
and so many bytes. A try fits if it makes its steps without being refused or killed, none of them
longer than `Search.slowest` times what plain training takes for as much: paging by the system has
no other end than the disk's. How slow is too slow is a matter of taste, so the largest of what was
tried is also told for the paces of `PACES`. Ways that count bytes themselves get a share of the
memory as their budget, and the rest is for operators' temporaries, which nobody can put off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.baselines import DTR, REPLAY
from dynoffload.experiments.baselines.cgroup import memory_group, swap_file
from dynoffload.experiments.trainer import BUDGETED, PLAIN, Spec
from dynoffload.experiments.workers import Worker, WorkerError, ended_after, worker
from dynoffload.memory.spill import default_spill_dir
from dynoffload.pilot.progress import Report
from dynoffload.units import format_bytes, format_seconds

OURS = "repeat"
"""The way that stands for this library: a pilot would have to be trained for each size."""
PACES = (2.0, 4.0, 8.0)
"""Times what plain training takes for as much."""
_START_S = 120.0  # to come to the block and make a first step
_PLAIN_S = 600.0  # of a step of plain training, before its pace is known
_BEFORE = 3  # processes that are looked at before there is a network
_SPARE = 1.5  # of swap: pages stay in it after they were read back


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        title: in tables.
        mode: see `Spec`.
        policy: of `OffloadConfig`, or ...
        baseline: ... a name of `dynoffload.experiments.baselines`, where it counts bytes.
        pilot: see `Spec`.
        swap: whether the system may page.
    """

    title: str
    mode: str = BUDGETED
    policy: str = ""
    baseline: str = ""
    pilot: str | None = None
    swap: bool = False


WAYS = {
    "plain": Way("plain PyTorch", PLAIN),
    "system": Way("paging by the system", PLAIN, swap=True),
    "dtr": Way("rematerialisation (DTR)", baseline=DTR),
    "on-demand": Way("dynoffload, on demand", policy="on-demand"),
    "replay": Way("dynoffload, recorded order", baseline=REPLAY),
    OURS: Way("dynoffload, last order", policy=OURS),
}
"""By the name that ``--ways`` takes."""


@dataclass(frozen=True)
class Try:
    """One size, tried.

    Attributes:
        size: that was tried.
        why: it does not fit; "" if it does.
        seconds: median of its steps; 0.0 without any.
        losses: of its steps, as `float.hex` writes them.
    """

    size: int
    why: str
    seconds: float = 0.0
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """What is asked of every way.

    Attributes:
        spec: size -> what plain training runs.
        memory: bytes beyond what a process takes before there is a network.
        share: of it that is the budget of a way that counts.
        steps: that a try makes after the first.
        slowest: times as long as plain training takes for as much, that a step may take.
        most: the largest size that is tried.
        meta: whether ways that count build on the meta device.
        spill_dir: where spill and swap files lie.
    """

    spec: Callable[[int], Spec]
    memory: int
    share: float
    steps: int
    slowest: float
    most: int
    meta: bool
    spill_dir: Path = field(default_factory=default_spill_dir)

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.steps >= 1 and self.slowest > 1 and self.most >= 1):
            raise ConfigError(
                f"share={self.share} must be above 0 and at most 1, steps={self.steps} and "
                f"most={self.most} at least 1, slowest={self.slowest} above 1"
            )

    @property
    def budget(self) -> int:
        """Of a way that counts bytes."""
        return int(self.memory * self.share)

    def of(self, way: Way, size: int) -> Spec:
        """Return what ``way`` runs."""
        spec = self.spec(size)
        if way.mode == PLAIN:
            return spec
        return replace(
            spec,
            mode=BUDGETED,
            budget=self.budget,
            pilot=way.pilot,
            config={} if way.baseline else {"policy": way.policy},
            baseline=way.baseline,
            meta=self.meta and way.baseline != DTR,
            spill_dir=str(self.spill_dir),
        )


def measure(search: Search, keys: Sequence[str], report: Report) -> dict[str, Any]:
    """Return what each way can do, by key, plain training's first: the others' time is told by it.

    Raises:
        ConfigError: a key is unknown, or plain training does not fit at the smallest size.
        LimitError: the system lets no memory be limited.
    """
    unknown = [key for key in keys if key not in WAYS]
    if unknown:
        raise ConfigError(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    base = _before(search)
    found: dict[str, Any] = {}
    room = _Room(base)
    for key in ("plain", *(key for key in keys if key != "plain")):
        way = WAYS[key]
        tries = _search(search, way, room, report)
        best = max((each for each in tries if not each.why), key=lambda t: t.size, default=None)
        if key == "plain":
            if best is None:
                raise ConfigError(
                    f"plain training does not fit {format_bytes(search.memory)} at size 1: "
                    f"{tries[0].why}"
                )
            known = {each.size: each.seconds for each in tries if not each.why}
            room = _Room(base, best.size, known)
        found[key] = {
            "title": way.title,
            "largest": 0 if best is None else best.size,
            "seconds": None if best is None else best.seconds,
            "seconds_over_plain": None if best is None else best.seconds / room.paced(best.size),
            "ended_by": _ended_by(tries, search),
            "tries": [
                asdict(each) | {"pace": each.seconds / room.paced(each.size)}
                for each in sorted(tries, key=lambda each: each.size)
            ],
        }
        found[key]["within"] = _within(found[key]["tries"])
    plain = found["plain"]["largest"]
    for row in found.values():
        row["over_plain"] = row["largest"] / plain
    return {"process_before_bytes": base, "losses_equal": _same_losses(found), "ways": found}


@dataclass(frozen=True)
class _Room:
    """What tries are measured by.

    Attributes:
        base: bytes of a process before there is a network.
        holds: the largest size of plain training; 0 while that is not known.
        known: seconds of its steps, by size.
    """

    base: int
    holds: int = 0
    known: Mapping[int, float] = field(default_factory=dict)

    def paced(self, size: int) -> float:
        """Return the seconds that plain training takes, or would take, for a step of ``size``."""
        return self.known.get(size, self.known[self.holds] / self.holds * size)


def _search(search: Search, way: Way, room: _Room, report: Report) -> list[Try]:
    """Double until a size does not fit, then halve the gap between it and those that do.

    As long as none fits, one that is only too slow is doubled too: what a way takes for each
    operator weighs most in the smallest steps.
    """
    tries: list[Try] = []

    def fits(size: int) -> bool:
        report(f"{way.title}: {size}", len(tries), None)
        tries.append(_try(search, way, size, room))
        return not tries[-1].why

    low, high = 0, 1
    while high <= search.most:
        if fits(high):
            low = high
        elif low or not tries[-1].seconds:
            break
        high *= 2
    high = min(high, search.most + 1)
    while low and high - low > max(1, low // 16):  # to a sixteenth, beyond which nothing is told
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return tries


def _try(search: Search, way: Way, size: int, room: _Room) -> Try:
    allowed = search.slowest * room.paced(size) if room.holds else _PLAIN_S
    deadline = _START_S + 4 * (search.steps + 1) * allowed
    started: Worker | None = None
    with ExitStack() as stack:
        if way.swap:
            need = room.base + search.memory * size // max(1, room.holds)
            stack.enter_context(swap_file(search.spill_dir, int(_SPARE * need)))
        limit = room.base + search.memory
        group = stack.enter_context(memory_group(limit, swap=way.swap))
        try:
            started = stack.enter_context(
                worker(f"{way.title} {size}", search.of(way, size), group)
            )
            with ended_after(started.kill, deadline) as late:
                started.wait_ready()
                for number in range(search.steps + 1):
                    started.step(measured=number > 0)
                    if number and started.steps[-1].seconds > allowed:
                        break
        except WorkerError as error:
            why = str(error)
            if started is not None and late.is_set():
                why = f"no end after {format_seconds(deadline)}"
            return Try(size, why.strip().splitlines()[-1][-300:])
        seconds = [step.seconds for step in started.measured]
        losses = tuple(started.losses)
    slowest = max(seconds)
    why = ""
    if slowest > allowed:
        why = f"a step of {format_seconds(slowest)}, above {format_seconds(allowed)}"
    return Try(size, why, median(seconds), losses)


def _before(search: Search) -> int:
    """Return what a process is charged with before there is a network, the least of several: the
    first that reads a library's files is charged with them, later ones are not."""
    spec, charged = replace(search.spec(1), meta=True), []
    for _ in range(_BEFORE):
        with memory_group(None) as group, worker("before", spec, group) as started:
            charged.append(started.before["charged_bytes"])
    return min(charged)


def _ended_by(tries: Sequence[Try], search: Search) -> str:
    """Return why the smallest size beyond those that fit does not."""
    most = max((each.size for each in tries if not each.why), default=0)
    failed = [each for each in tries if each.why and each.size > most]
    if not failed:
        return f"nothing: {search.most} is the largest that was tried"
    return min(failed, key=lambda each: each.size).why


def _within(tries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the largest of what fits and kept a pace, by the pace; 0 if nothing did."""
    fits = [each for each in tries if not each["why"]]
    return {
        f"{most:g}": max((each["size"] for each in fits if each["pace"] <= most), default=0)
        for most in PACES
    }


def _same_losses(found: Mapping[str, Any]) -> bool:
    """Return whether all ways had the same losses wherever two made steps of one size."""
    known: dict[int, tuple[str, ...]] = {}
    for row in found.values():
        for each in row["tries"]:
            if each["losses"]:
                losses = tuple(each["losses"])
                first = known.setdefault(each["size"], losses)
                common = min(len(first), len(losses))
                if first[:common] != losses[:common]:
                    return False
    return True
