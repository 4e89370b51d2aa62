"""Training of one case of `dynoffload.experiments.gpu_check`.

Each case is trained twice in plain PyTorch and once offloaded; all state is compared bit by bit.
If the two baselines differ, the case is not deterministic: neither exact nor failed.

[Note: beside]  A budget on an accelerator limits all memory that its allocator provides, including
library workspaces and the copies for comparison. So these are added to the case's budget: the
bytes allocated before the network is built, the second baseline's peak above its training state,
and what late streams take.

[Note: deterministic]  Algorithms that torch calls deterministic are required. ``"warn"`` may choose
others even where there is one: attention's backward on CUDA. Where there is none, torch names the
kernel in an error, and the case is trained with ``"warn"``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dynoffload.config import ACCELERATOR
from dynoffload.experiments import zoo
from dynoffload.experiments.allowed import CONFIG, budget_of
from dynoffload.experiments.bits import first_difference, state_of
from dynoffload.experiments.gpu_check_cases import Case, Kind
from dynoffload.experiments.late import Late
from dynoffload.experiments.predictors import LyingPilot
from dynoffload.experiments.zoo.building import moved
from dynoffload.memory.accelerator.streams import Streams
from dynoffload.runtime import target
from dynoffload.units import MiB

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Must be ``:4096:8`` before the first CUDA matrix product, for reproducible bits."""
SCRATCH = 8 * MiB
"""Bytes of each delaying copy: 0.2 ms on a link of 50 GB/s."""
_TEMPORARY = {"evoformer": MiB}  # extra budget for activations of one sample
_CPU = torch.device("cpu")
_LR, _CLIP = 1e-3, 0.5  # of the optimizer on the host


class Verdict(Enum):
    """Outcome of a case."""

    EXACT = "exact"
    FAILED = "FAILED"
    NOT_DETERMINISTIC = "not deterministic"
    NOT_RUN = "not run"


def environment() -> dict[str, str]:
    """Return the environment variables to set before a process of cases starts."""
    return {WORKSPACE: os.environ.get(WORKSPACE, ":4096:8")}


@contextlib.contextmanager
def deterministic(mode: str = "error") -> Iterator[None]:
    """Make torch use deterministic algorithms; see [Note: deterministic]."""
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    filling = settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(mode)
    # Filling uninitialized memory, in plain training too, would mask reads of it.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filling


def kernel_named_by(error: Exception) -> str:
    """Return what torch says of a kernel that has no deterministic algorithm, or ""."""
    said = str(error).partition(" deterministic implementation")
    return f"({said[0]}{said[1]})" if said[1] else ""


Loss = Callable[[nn.Module, int], Tensor]


def _subject(case: Case, device: torch.device) -> tuple[Callable[[], nn.Module], Loss]:
    """Return a function that builds a case's network, and its loss on a sample by number."""
    name = case.network.removeprefix("transformers:")
    if name != case.network:
        from dynoffload.experiments.architectures import ARCHITECTURES

        one = ARCHITECTURES[name]
        return one.build, lambda model, number: one.loss(
            model(**moved(case.loop.given(one.sample(model, number)), device))
        )
    count = case.loop.steps * case.loop.accumulate
    samples = [moved(each.args, device) for each in islice(zoo.samples(name, seed=0), count)]

    def build() -> nn.Module:
        preset = "small" if case.kind is Kind.COUNTED else "tiny"
        model: nn.Module = zoo.build(name, "tiny-untied" if name == "tree" else preset)
        if case.kind is Kind.TILES:
            from dynoffload.tiling.splitting import tile

            tile(model, "8KiB")
        return model

    return build, lambda model, number: model(*samples[number]).loss


@dataclass(frozen=True)
class _Run:
    """Result of one training run.

    Attributes:
        steps: losses of each step, and of most cases the state after it.
        end: state after training.
        took: peak bytes of the accelerator's allocator above those allocated before; 0 where it
            does not count.
    """

    steps: Sequence[dict[str, Any]]
    end: dict[str, Any]
    took: int = 0

    def difference(self, expected: _Run) -> str:
        """Return the first difference from another run, "" if there is none."""
        for number, (one, other) in enumerate(zip(self.steps, expected.steps, strict=True)):
            found = first_difference(one, other, f"step {number}")
            if found:
                return found
        return first_difference(self.end, expected.end, "after")


class _Training:
    """One case on one device: trains it in plain PyTorch and with this library.

    Args:
        case: what to train.
        device: where the accelerator's tensors are.
        spill_dir: of the spill file.
        named: device name to pass to sessions, if it differs.
    """

    def __init__(
        self, case: Case, device: torch.device, spill_dir: str | None, named: str | None
    ) -> None:
        self.case, self.device = case, device
        self.spill_dir, self.named = spill_dir, named
        self._build, self._loss = _subject(case, device)

    def _network(self) -> nn.Module:
        torch.manual_seed(0)
        model = self._build()
        self.case.loop.prepare(model)
        return model

    def _steps(self, model: nn.Module, optimizer: Optimizer) -> Iterator[dict[str, Any]]:
        def loss_of(network: nn.Module, number: int) -> Tensor:
            torch.manual_seed(number)
            return self._loss(network, number)

        looks = self.case.kind not in (Kind.COUNTED, Kind.IN_BACKWARD)
        for losses in self.case.loop.train(model, optimizer, loss_of):
            state = state_of(model, optimizer) if looks else {}
            yield {"losses": moved(losses, _CPU), **moved(state, _CPU)}

    def plainly(self) -> _Run:
        """Train in plain PyTorch."""
        if self.case.kind is Kind.HOST_OPTIMIZER:
            return self._by_definition()
        held = _held_bytes(self.device)
        model = self._network().to(self.device)
        optimizer = self.case.loop.make_optimizer(model)
        _peak_bytes(self.device)
        steps = list(self._steps(model, optimizer))
        took = max(0, _peak_bytes(self.device) - held)
        return _Run(steps, moved(state_of(model, optimizer), _CPU), took)

    def ours(self, expected: _Run) -> dict[str, Any]:
        """Train with this library; return ``why`` the run is not as expected, and statistics."""
        if self.case.kind is Kind.HOST_OPTIMIZER:
            return {"why": self._on_the_host().difference(expected)}
        import dynoffload

        case, held = self.case, _held_bytes(self.device)
        model = self._network()
        if case.starts_there:
            model.to(self.device)
        optimizer = case.loop.make_optimizer(model)
        config = dict(CONFIG)
        if case.kind is Kind.COUNTED:
            config |= {"page_bytes": None, "min_paged_bytes": None}
        if case.kind is Kind.IN_BACKWARD:
            config |= {"optimizer_in_backward": True}
        allowed = budget_of(model, optimizer, ACCELERATOR, config)
        beside = held + max(0, expected.took - allowed.whole)  # see [Note: beside]
        beside += Late.taken_bytes(SCRATCH) if case.kind is Kind.RACES else 0
        budget = allowed.budget + _TEMPORARY.get(case.network, 0) + beside
        pilot = None if case.lies is None else _wrong_pilot(model, case.lies)
        with (
            late(case.seed if case.kind is Kind.RACES else None) as made,
            dynoffload.offload(
                model,
                optimizer,
                budget=budget,
                config=config,
                spill_dir=self.spill_dir,
                host_budget=allowed.whole // 2 if case.files else None,
                device=self.named or (None if case.starts_there else self.device),
                **({} if pilot is None else {"pilot": pilot}),
            ) as session,
        ):
            steps = list(self._steps(model, optimizer))
            counts = session.log.steps
        found = {
            "backend": session.backend,
            "budget": budget,
            "peak_fast_bytes": max(step.peak_fast_bytes for step in counts),
            "peak_allocated": max((step.peak_allocated_bytes for step in counts[1:]), default=0),
            "bytes_in": sum(step.bytes_in for step in counts),
            "bytes_out": sum(step.bytes_out for step in counts),
            "delays": sum(queues.delays for queues in made),
            "asked": 0 if pilot is None else pilot.asked,
        }
        run = _Run(steps, moved(state_of(model, optimizer), _CPU))
        return {"why": run.difference(expected) or shortcoming(case, found), **found}

    # The host optimizer, and its definition in plain PyTorch

    def _losses(self, model: nn.Module) -> Iterator[Tensor]:
        for number in range(self.case.loop.steps):
            torch.manual_seed(number)
            loss = self._loss(model, number)
            loss.backward()  # type: ignore[no-untyped-call]
            yield loss.detach().cpu()

    def _by_definition(self) -> _Run:
        model = self._network().to(self.device)
        parameters = list(model.parameters())
        masters = [nn.Parameter(p.detach().float().cpu()) for p in parameters]
        inner, losses = AdamW(masters, lr=_LR, fused=True), []
        for loss in self._losses(model):
            losses.append(loss)
            if self.case.loop.clip:
                nn.utils.clip_grad_norm_(parameters, _CLIP, foreach=False)
            for master, p in zip(masters, parameters, strict=True):
                master.grad = None if p.grad is None else p.grad.cpu().float()
                p.grad = None
            inner.step()
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    if master.grad is not None:
                        p.copy_(master)
        return _Run([{"losses": losses}], moved(dict(model.state_dict()), _CPU))

    def _on_the_host(self) -> _Run:
        import dynoffload

        model = self._network().to(self.device)
        optimizer = dynoffload.HostOptimizer(
            model.parameters(),
            AdamW,
            lr=_LR,
            tile_bytes="64KiB",  # several tiles per step
            spill_dir=(self.spill_dir or "/var/tmp") if self.case.files else None,
        )
        losses = []
        try:
            for loss in self._losses(model):
                losses.append(loss)
                if self.case.loop.clip:
                    optimizer.clip_grad_norm_(_CLIP)
                optimizer.step()
            return _Run([{"losses": losses}], moved(dict(model.state_dict()), _CPU))
        finally:
            optimizer.close()


def train_case(
    case: Case, device: torch.device, spill_dir: str | None = None, named: str | None = None
) -> dict[str, Any]:
    """Train one case in this process; for the arguments see `_Training`.

    Returns:
        ``verdict``, a value of `Verdict`; ``why``, "" for an exact case; ``kernel``, what torch
        says of one that has no deterministic algorithm, or ""; and for paged cases
        ``backend``, ``budget``, ``peak_fast_bytes``, ``peak_allocated`` (the allocator's after the
        first step, with operators' temporaries; 0 where it does not count), ``bytes_in``,
        ``bytes_out``, ``delays``, and ``asked``: calls of a wrong pilot.
    """
    kernel, mode = "", "error"
    while True:
        try:
            with deterministic(mode):
                training = _Training(case, device, spill_dir, named)
                first, second = (training.plainly() for _ in range(2))
            break
        except Exception as error:
            kernel, before = kernel_named_by(error), kernel
            if before or not kernel:
                why = f"plain PyTorch cannot train it here: {type(error).__name__}: {error}"
                return {"verdict": Verdict.NOT_RUN.value, "why": why[:500]}
            mode = "warn"
    difference = second.difference(first)
    if difference:
        why = f"plain training differs from itself: {difference} {kernel}".rstrip()
        return {"verdict": Verdict.NOT_DETERMINISTIC.value, "why": why}
    del first
    with deterministic(mode):
        found = training.ours(second)
    verdict = Verdict.FAILED if found["why"] else Verdict.EXACT
    return {"verdict": verdict.value, "kernel": kernel, **found}


def shortcoming(case: Case, found: dict[str, Any]) -> str:
    """Return why a bit-exact run still fails its check, or ""."""
    budget = found["budget"]
    if found["peak_fast_bytes"] > budget:
        return f"{found['peak_fast_bytes']} bytes of regions are more than the budget of {budget}"
    if case.kind is Kind.COUNTED and found["peak_allocated"] > budget:
        return f"the allocator gave {found['peak_allocated']} bytes under a budget of {budget}"
    shows_nothing = {
        "nothing was paged": not found["bytes_in"],
        "nothing was late": case.kind is Kind.RACES and not found["delays"],
        "the pilot was not asked": case.lies is not None and not found["asked"],
    }
    why = next((what for what, so in shows_nothing.items() if so), "")
    return f"{why}, so that this shows nothing" if why else ""


def _held_bytes(device: torch.device) -> int:
    """Return the allocated bytes after garbage collection."""
    gc.collect()
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def _peak_bytes(device: torch.device) -> int:
    """Return the peak allocated bytes since the last call, and reset the peak."""
    if device.type == "cpu":
        return 0
    peak = int(torch.accelerator.max_memory_allocated(device))
    torch.accelerator.reset_peak_memory_stats(device)
    return peak


def _wrong_pilot(model: nn.Module, seed: int) -> LyingPilot:
    chance = random.Random(seed)
    return LyingPilot(model, [[chance.randrange(-2, 40) for _ in range(20)] for _ in range(5)])


@contextlib.contextmanager
def late(seed: int | None) -> Iterator[list[Late]]:
    """Make sessions that begin in this block use randomly delayed streams, and yield those;
    ``seed=None`` leaves the streams unchanged."""
    made: list[Late] = []
    if seed is None:
        yield made
        return
    opened: Callable[[torch.device], Streams] = vars(target)["open_streams"]

    def open_late(device: torch.device) -> Streams:
        made.append(Late(opened(device), seed, SCRATCH))
        return cast(Streams, made[-1])

    try:
        with mock.patch.object(target, "open_streams", open_late):
            yield made
    finally:
        for queues in made:
            queues.close()
