"""One try of `dynoffload.experiments.largest`: a way at one size, in a memory cgroup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dynoffload.errors import ConfigError
from dynoffload.experiments import contest
from dynoffload.experiments.contest import Contestant
from dynoffload.experiments.harness import check_known, option
from dynoffload.experiments.ways import BUDGETED, CHECKPOINT, DTR, PLAIN, REPLAY, Spec
from dynoffload.memory.spill import default_spill_dir
from dynoffload.units import format_seconds, parse_bytes

OURS = "repeat"
"""The method that represents this library: a pilot would have to be trained for each size."""
_START_S = 120.0  # to enter the block and make a first step
_PLAIN_S = 600.0  # for a plain step, before its time is known
_SPARE = 1.5  # factor of swap: pages keep their slot after they are read back


@dataclass(frozen=True)
class Way:
    """A method of training.

    Attributes:
        title: in tables.
        look: colour and marker in figures.
        mode: see `Spec`.
        policy: of `OffloadConfig`, for this library.
        swap: whether the system may page.
    """

    title: str
    look: tuple[str, str]
    mode: str = BUDGETED
    policy: str = ""
    swap: bool = False


WAYS = {
    "plain": Way("plain PyTorch", ("ink", "o"), PLAIN),
    "system": Way("paging by the system", ("fault", "v"), PLAIN, swap=True),
    DTR: Way("rematerialisation (DTR)", ("stall", "D"), DTR),
    CHECKPOINT: Way("activation checkpointing", ("optimizer", "X"), CHECKPOINT),
    "on-demand": Way("dynoffload, on demand", ("rss", "^"), policy="on-demand"),
    REPLAY: Way("dynoffload, recorded order", ("backward", "s"), REPLAY),
    OURS: Way("dynoffload, last order", ("plan", "P"), policy=OURS),
}
"""Method by its name in ``--ways``."""


@dataclass(frozen=True)
class Subject:
    """A model or batch that grows.

    Attributes:
        title: above its table.
        unit: what a size counts, in the plural.
        spec: size -> what plain training runs.
        meta: whether methods that count bytes build on the meta device.
    """

    title: str
    unit: str
    spec: Callable[[int], Spec]
    meta: bool = False


@dataclass(frozen=True)
class Try:
    """Result of one size.

    Attributes:
        size: the size.
        why: the reason why it does not fit; "" if it does.
        seconds: median of its steps; 0.0 without any.
        losses: of its steps, in `float.hex` format.
    """

    size: int
    why: str
    seconds: float = 0.0
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Params:
    """Memory, sizes and limits of every method."""

    memory: str = option("512MiB", "that a process may take beyond what it takes without a network")
    share: float = option(0.5, "of that, as the budget of ways that count bytes")
    tokens: int = option(512, "of a step")
    steps: int = option(2, "that each try makes after the first")
    slowest: float = option(8.0, "times plain training's time for as much, that is too slow")
    most: int = option(64, "the largest size that is tried")
    ways: tuple[str, ...] = option(tuple(WAYS), "of training; plain is always tried")
    spill_dir: Path | None = option(None, "where spill and swap files lie", place=True)

    def __post_init__(self) -> None:
        check_known("ways", self.ways, WAYS)
        if not (0 < self.share <= 1 and self.steps >= 1 and self.slowest > 1 and self.most >= 1):
            raise ConfigError(
                f"share={self.share} must be above 0 and at most 1, steps={self.steps} and "
                f"most={self.most} at least 1, slowest={self.slowest} above 1"
            )


@dataclass(frozen=True)
class Room:
    """Reference values for a method's tries.

    Attributes:
        base: bytes of a process without a network.
        known: size -> seconds of a plain step.
    """

    base: int
    known: Mapping[int, float]

    @property
    def holds(self) -> int:
        """The largest size of plain training; 0 while unknown."""
        return max(self.known, default=0)

    def paced(self, size: int) -> float:
        """Return the measured or extrapolated seconds of a plain step of ``size``."""
        return self.known.get(size, self.known[self.holds] / self.holds * size)


def spec_of(params: Params, subject: Subject, way: Way, size: int) -> Spec:
    """Return the spec that ``way`` runs."""
    spec = subject.spec(size)
    if way.mode in (PLAIN, CHECKPOINT):
        return replace(spec, mode=way.mode)
    return replace(
        spec,
        mode=way.mode,
        budget=int(parse_bytes(params.memory) * params.share),
        config={"policy": way.policy} if way.policy else {},
        meta=subject.meta and way.mode != DTR,
        spill_dir=str(params.spill_dir or default_spill_dir()),
    )


def attempt(params: Params, subject: Subject, way: Way, size: int, room: Room) -> Try:
    """Train one size and return whether it fits."""
    allowed = params.slowest * room.paced(size) if room.holds else _PLAIN_S
    memory, swap = parse_bytes(params.memory), 0
    if way.swap:
        swap = int(_SPARE * (room.base + memory * size // max(1, room.holds)))
    runs = contest.Way(spec_of(params, subject, way, size), room.base + memory, swap)
    one = Contestant(f"{way.title} {size}", runs, lambda: _START_S + 4 * allowed)
    with ExitStack() as stack:
        one.start(stack)
        for number in range(params.steps + 1):
            one.step(measured=number > 0)
            if one.steps and one.steps[-1].seconds > allowed:
                break
        if one.why:
            return Try(size, one.why)
        seconds, losses = [step.seconds for step in one.steps], tuple(one.losses)
    slow = f"a step of {format_seconds(max(seconds))}, above {format_seconds(allowed)}"
    return Try(size, slow if max(seconds) > allowed else "", median(seconds), losses)
