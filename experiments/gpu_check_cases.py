"""One case of `dynoffload.experiments.gpu_check`: a network trained plainly, again, and paged.

What it is: `Case`, the list of `cases`, and `train_case`, which trains one and compares every bit
of losses, parameters, gradients, buffers, optimizer state and random numbers. What it is not:
aware of which accelerator it is, nor of processes.

[Note: beside]  A budget on an accelerator caps all that its allocator gives: workspaces of
libraries, which for networks as small as these are far more than all they keep, and the copies that
comparing takes. So two sums come to the budget: what is still held as the block begins, once
garbage is collected, and what plain training took beyond that and beside what it keeps. The second
plain training says the latter, as workspaces are held since the first.

[Note: not deterministic]  Deterministic algorithms are on, but not every operator of every
accelerator has one. So plain training runs twice, and only where it equals itself can paged
training be asked to equal it: a case in which it does not is told apart, and counts neither as
exact nor as failed. A case that plain PyTorch cannot train here is not run.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynoffload.config import ACCELERATOR
from dynoffload.experiments import zoo
from dynoffload.experiments.allowed import CONFIG, budget_of
from dynoffload.experiments.bits import first_difference, state_of
from dynoffload.experiments.late import Late
from dynoffload.experiments.loops import Loop
from dynoffload.experiments.lying import LyingPilot
from dynoffload.experiments.zoo.building import moved
from dynoffload.memory.accelerator.streams import Streams
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime import target
from dynoffload.units import MiB

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Must say ``:4096:8`` before the process multiplies a matrix on CUDA, for the same bits again."""
SCRATCH = 8 * MiB
"""Bytes of each copy that makes others late: 0.2 ms of a link of 50 GB/s."""
_PRESETS = {"tree": "tiny-untied"}
_TEMPORARY = {"evoformer": MiB}  # bytes of activations that a sample needs beside its share
_COUNTED: dict[str, Any] = {
    "preset": "small",
    "looks": False,
    "config": {"page_bytes": None, "min_paged_bytes": None},
}
_CPU = torch.device("cpu")


class Verdict(Enum):
    """What came of a case."""

    EXACT = "exact"
    FAILED = "FAILED"
    NOT_DETERMINISTIC = "not deterministic"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Case:
    """One network, trained by one loop in one way.

    Attributes:
        network: a network of the zoo, or ``transformers:`` and an architecture of
            `dynoffload.experiments.architectures`.
        loop: how it is trained.
        files: half of what is kept is in a file below host memory.
        late: seed of queues that are late, or None for those of the accelerator as they are.
        lies: seed of a pilot that lies, or None for none.
        starts_there: the model is on the accelerator before the block begins, not on the CPU.
        tiles: the most bytes of a tile that large layers are split into first; "" leaves them.
        preset: of a network of the zoo; "" for the smallest.
        looks: compare all state after every step, which copies it on the accelerator; else losses
            alone until the end, and the allocator's peak has to stay within the budget.
        config: options of `dynoffload.OffloadConfig` that differ from those of all cases.
    """

    network: str
    loop: Loop
    files: bool = False
    late: int | None = None
    lies: int | None = None
    starts_there: bool = False
    tiles: str = ""
    preset: str = ""
    looks: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return it in a few words."""
        ways = [
            "host memory and a file" if self.files else "host memory",
            "" if self.late is None else f"late queues {self.late}",
            "" if self.lies is None else f"lying pilot {self.lies}",
            "from the accelerator" if self.starts_there else "",
            f"tiles of {self.tiles}" if self.tiles else "",
            "" if self.looks else "bytes counted",
        ]
        return (
            f"{self.network} {self.preset}".strip()
            + f": {self.loop.describe()}; {', '.join(filter(None, ways))}"
        )


_ZOO = ("moe", "tree", "depths", "early-lstm", "evoformer")
_TRANSFORMERS = ("transformers:mixtral", "transformers:qwen3-moe", "transformers:llama")
_LOOPS = (
    Loop("AdamW foreach", clip="norm", accumulate=2),
    Loop("AdamW fused", autocast="bfloat16"),
    Loop("SGD momentum", autocast="float16", clip="norm"),
    Loop("RMSprop centered", clip="value"),
    Loop("AdamW fused", weights="bfloat16"),
)
_CHECKPOINTED = (
    Loop("AdamW foreach", checkpointing="not reentrant"),
    Loop("AdamW fused", checkpointing="reentrant", accumulate=2),
)


def cases(steps: int = 4) -> list[Case]:
    """Return all cases, the most telling ones first, for whoever has not the time for all.

    Args:
        steps: of each.
    """
    plain, fused = Loop("AdamW foreach"), Loop("AdamW fused")
    late = ("moe", "evoformer", "transformers:mixtral", "early-lstm")
    races = [
        Case(name, plain, files=seed % 2 == 1, late=seed, lies=seed if seed % 4 > 1 else None)
        for seed, name in enumerate(late * 2)
    ]
    found = [Case(name, plain) for name in (*_ZOO, *_TRANSFORMERS)]
    found += [*races[:4], Case("moe", fused, tiles="8KiB")]
    found += [Case(name, fused, files=True, starts_there=True) for name in (*_ZOO, *_TRANSFORMERS)]
    found += [
        Case("moe", loop, files=number % 2 == 1, starts_there=number % 2 == 0)
        for number, loop in enumerate(_LOOPS)
    ]
    found += [Case("transformers:llama", loop) for loop in _CHECKPOINTED]
    found += [Case("moe", fused, files=seed % 2 == 1, lies=seed) for seed in range(4)]
    found += [
        Case("moe", fused, files=files, starts_there=True, **_COUNTED) for files in (False, True)
    ]
    found += races[4:]
    return [replace(case, loop=replace(case.loop, steps=steps)) for case in found]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch for algorithms that give the same bits again, where it has them."""
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    filling = settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    # Else torch would fill what is only allocated, in plain training too, and hide who reads that.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filling


@dataclass(frozen=True)
class _Subject:
    """A network with its samples."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]


def _subject(case: Case, device: torch.device) -> _Subject:
    name = case.network.removeprefix("transformers:")
    if name != case.network:
        from dynoffload.experiments.architectures import ARCHITECTURES

        one = ARCHITECTURES[name]

        def loss_of(model: nn.Module, number: int) -> Tensor:
            return one.loss(model(**moved(case.loop.given(one.sample(model, number)), device)))

        return _Subject(one.build, loss_of)
    count = case.loop.steps * case.loop.accumulate
    samples = [moved(each.args, device) for each in islice(zoo.samples(name, seed=0), count)]

    def loss_of_zoo(model: nn.Module, number: int) -> Tensor:
        loss: Tensor = model(*samples[number]).loss
        return loss

    preset = case.preset or _PRESETS.get(name, "tiny")
    return _Subject(partial(_built, case, name, preset), loss_of_zoo)


def _built(case: Case, name: str, preset: str) -> nn.Module:
    model: nn.Module = zoo.build(name, preset)
    if case.tiles:
        from dynoffload.tiling.splitting import tile

        tile(model, case.tiles)
    return model


@dataclass(frozen=True)
class _Run:
    """What one run left.

    Attributes:
        steps: losses and norms of each step, and what training has changed by then.
        end: what it had changed when it was over.
        took: the most bytes that the accelerator's allocator had given beyond those that were held
            before; 0 where it does not count.
    """

    steps: list[dict[str, Any]]
    end: dict[str, Any]
    took: int = 0


def train_case(
    case: Case, device: torch.device, spill_dir: str | None = None, named: str | None = None
) -> dict[str, Any]:
    """Train one case in this process and return what was found.

    Args:
        case: what to train.
        device: where the accelerator's tensors are.
        spill_dir: where the file lies.
        named: what sessions are told as their device, if it is another name.

    Returns:
        ``verdict``, a value of `Verdict`; ``why``, "" for an exact case; and, of what was paged,
        ``budget``, ``peak_fast_bytes``, ``first_allocated`` and ``peak_allocated`` (the allocator's
        peak in the first step and in all others, operators' temporaries included; 0 where it does
        not count), ``host_bytes`` that were pinned, ``charged_bytes`` by which the process's
        resident set grew, ``bytes_in``, ``bytes_out`` and ``delays``.
    """
    with deterministic():
        try:
            subject = _subject(case, device)
            torch.manual_seed(0)
            model = subject.build()
            case.loop.prepare(model)
            plain = [_plainly(case, copy.deepcopy(model), device, subject) for _ in range(2)]
        except Exception as error:
            why = f"plain PyTorch cannot train it here: {type(error).__name__}: {error}"
            return {"verdict": Verdict.NOT_RUN.value, "why": why[:500]}
        first, second = plain
        difference = _difference(second, first)
        if difference:
            why = f"plain training differs from itself: {difference}"
            return {"verdict": Verdict.NOT_DETERMINISTIC.value, "why": why}
        del first, plain
        return _paged(case, model, device, subject, second, spill_dir, named)


def train_plainly(case: Case, device: torch.device) -> None:
    """Train the network of a case plainly, and compare nothing."""
    subject = _subject(case, device)
    torch.manual_seed(0)
    model = subject.build()
    case.loop.prepare(model)
    with deterministic():
        _plainly(case, model, device, subject)


def _trained(
    case: Case, model: nn.Module, optimizer: Optimizer, subject: _Subject
) -> Iterator[dict[str, Any]]:
    def loss_of(network: nn.Module, number: int) -> Tensor:
        torch.manual_seed(number)
        return subject.loss(network, number)

    for losses in case.loop.train(model, optimizer, loss_of):
        state = state_of(model, optimizer) if case.looks else {}
        yield {"losses": moved(losses, _CPU), **moved(state, _CPU)}


def _held_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator has given and that no garbage holds."""
    gc.collect()
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def _peak_bytes(device: torch.device) -> int:
    """Return the most bytes that the allocator had given since the last call."""
    if device.type == "cpu":
        return 0
    peak = int(torch.accelerator.max_memory_allocated(device))
    torch.accelerator.reset_peak_memory_stats(device)
    return peak


def _plainly(case: Case, model: nn.Module, device: torch.device, subject: _Subject) -> _Run:
    held = _held_bytes(device)
    model.to(device)
    optimizer = case.loop.make_optimizer(model)
    _peak_bytes(device)
    steps = list(_trained(case, model, optimizer, subject))
    took = max(0, _peak_bytes(device) - held)
    return _Run(steps, moved(state_of(model, optimizer), _CPU), took)


def _difference(found: _Run, expected: _Run) -> str:
    for number, (one, other) in enumerate(zip(found.steps, expected.steps, strict=True)):
        difference = first_difference(one, other, f"step {number}")
        if difference:
            return difference
    return first_difference(found.end, expected.end, "after")


def _paged(
    case: Case,
    model: nn.Module,
    device: torch.device,
    subject: _Subject,
    expected: _Run,
    spill_dir: str | None,
    named: str | None,
) -> dict[str, Any]:
    import dynoffload

    held = _held_bytes(device)
    if case.starts_there:
        model.to(device)
    optimizer = case.loop.make_optimizer(model)
    config = {**CONFIG, **case.config}
    allowed = budget_of(model, optimizer, ACCELERATOR, config)
    beside = held + max(0, expected.took - allowed.whole)  # see [Note: beside]
    budget = allowed.budget + _TEMPORARY.get(case.network, 0) + beside
    options: dict[str, Any] = {
        "budget": budget,
        "config": config,
        "spill_dir": spill_dir,
        "host_budget": allowed.whole // 2 if case.files else None,
        "device": named or (None if case.starts_there else device),
    }
    if case.lies is not None:
        options["pilot"] = _liar(model, case.lies)
    before = resident_bytes()
    with late(case.late) as made, dynoffload.offload(model, optimizer, **options) as session:
        steps = list(_trained(case, model, optimizer, subject))
        counts, backend = session.log.steps, session.backend
        pinned = session._paging.device.taken_bytes() if session._paging is not None else 0
        charged = resident_bytes() - before
    allocated = [step.peak_allocated_bytes for step in counts]
    found = {
        "backend": backend,
        "budget": budget,
        "peak_fast_bytes": max(step.peak_fast_bytes for step in counts),
        "first_allocated": allocated[0],
        "peak_allocated": max(allocated[1:], default=0),
        "host_bytes": pinned,
        "charged_bytes": charged,
        "bytes_in": sum(step.bytes_in for step in counts),
        "bytes_out": sum(step.bytes_out for step in counts),
        "delays": sum(queues.delays for queues in made),
    }
    run = _Run(steps, moved(state_of(model, optimizer), _CPU))
    why = _difference(run, expected) or _shortcoming(case, found, options)
    return {"verdict": (Verdict.FAILED if why else Verdict.EXACT).value, "why": why, **found}


def _shortcoming(case: Case, found: dict[str, Any], options: dict[str, Any]) -> str:
    """Return in what a run failed that has the right bits, "" if in nothing."""
    budget = found["budget"]
    if found["peak_fast_bytes"] > budget:
        return f"{found['peak_fast_bytes']} bytes of regions are more than the budget of {budget}"
    if not case.looks and found["peak_allocated"] > budget:
        return f"the allocator gave {found['peak_allocated']} bytes under a budget of {budget}"
    shows_nothing = {
        "nothing was paged": not found["bytes_in"],
        "nothing was late": case.late is not None and not found["delays"],
        "the pilot was not asked": case.lies is not None and not options["pilot"].asked,
    }
    for what, so in shows_nothing.items():
        if so:
            return f"{what}, so that this shows nothing"
    return ""


def _liar(model: nn.Module, seed: int) -> LyingPilot:
    chance = random.Random(seed)
    return LyingPilot(model, [[chance.randrange(-2, 40) for _ in range(20)] for _ in range(5)])


@contextlib.contextmanager
def late(seed: int | None) -> Iterator[list[Late]]:
    """Have sessions that begin in this block on queues that are late, and yield those; None: on
    the accelerator's as they are."""
    made: list[Late] = []
    if seed is None:
        yield made
        return
    opened: Callable[[torch.device], Streams] = vars(target)["open_streams"]

    def open_late(device: torch.device) -> Streams:
        made.append(Late(opened(device), seed, SCRATCH))
        return made[-1]

    try:
        with mock.patch.object(target, "open_streams", open_late):
            yield made
    finally:
        for queues in made:
            queues.close()


def environment() -> dict[str, str]:
    """Return the variables that must be set before a process of cases begins."""
    return {WORKSPACE: os.environ.get(WORKSPACE, ":4096:8")}
