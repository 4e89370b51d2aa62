"""A training process that steps on request: the child side of the comparisons.

`dynoffload.experiments.workers` calls `build`, `enter` and `ask` in a child process. Each variant
of a comparison has its own, so none shares memory, allocator or caches, and two can take turns. All
make the same steps on the same samples, so their losses can be compared bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.processes import NEVER_LEFT

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BUDGETED = "offload"
PLAIN = "plain"


@dataclass(frozen=True)
class Spec:
    """What one worker runs.

    Attributes:
        network: name in the zoo.
        preset: its sizes.
        sizes: sizes that override the preset's, for `dynoffload.experiments.zoo.build`.
        mode: `PLAIN` or `BUDGETED`.
        shape: of the samples, for `dynoffload.experiments.zoo.samples`.
        split: which files samples come from.
        data_seed: of the samples.
        seed: of the weights.
        optimizer: implementation of AdamW: ``"fused"``, ``"foreach"`` or ``"for-loop"``.
        lr: its learning rate.
        budget: bytes, if ``mode`` is `BUDGETED`.
        config: options of `dynoffload.OffloadConfig`.
        baseline: a name for `dynoffload.experiments.baselines.baseline`, instead of ``config``.
        pilot: path of a pilot, ``"auto"`` or None.
        meta: build on the meta device and materialize the weights inside the block.
        spill_dir: of the spill file.
        threads: compute threads; 0 for torch's default.
        watched: each step reports the modules it visited.
        clairvoyant: each step is given the modules it will visit, instead of a pilot.
    """

    network: str
    preset: str
    mode: str = PLAIN
    sizes: dict[str, int] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    split: str = "train"
    data_seed: int = 0
    seed: int = 0
    optimizer: str = "fused"
    lr: float = 1e-3
    budget: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    pilot: str | None = None
    meta: bool = False
    spill_dir: str | None = None
    threads: int = 0
    watched: bool = False
    clairvoyant: bool = False


def network(spec: Spec) -> nn.Module:
    """Return the network of ``spec``, on the meta device if ``spec.meta``."""
    from dynoffload.experiments import zoo

    device = "meta" if spec.meta else "cpu"
    return zoo.build(spec.network, spec.preset, seed=spec.seed, device=device, **spec.sizes)


def adamw(model: nn.Module, spec: Spec) -> Optimizer:
    """Return the optimizer of ``spec``."""
    from torch.optim import AdamW

    kinds: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }
    return AdamW(model.parameters(), lr=spec.lr, **kinds[spec.optimizer])


class Trainer:
    """One network, its optimizer and its samples."""

    def __init__(self, spec: Spec) -> None:
        import torch

        from dynoffload.experiments import zoo
        from dynoffload.experiments.predictors import Clairvoyant, watching
        from dynoffload.numerics import settle_kernels

        settle_kernels()
        self.spec = spec
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self.model = network(spec)
        self.optimizer = adamw(self.model, spec)
        self.samples = zoo.samples(spec.network, spec.split, seed=spec.data_seed, **spec.shape)
        self.session: Any = None
        self.clairvoyant = Clairvoyant(self.model) if spec.clairvoyant else None
        self.visited = watching(self.model) if spec.watched else None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Enter the block of the mode."""
        import torch

        torch.manual_seed(self.spec.seed)  # reset_parameters() runs in construction order
        block = contextlib.nullcontext() if self.spec.mode == PLAIN else self._block()
        with block as self.session:
            torch.manual_seed(self.spec.seed)  # for random operators in steps
            yield

    def _block(self) -> contextlib.AbstractContextManager[Any]:
        import dynoffload
        from dynoffload.experiments.baselines import baseline

        spec = self.spec
        where: dict[str, Any] = {"budget": spec.budget, "spill_dir": spec.spill_dir}
        if spec.baseline:
            return baseline(spec.baseline, self.model, self.optimizer, **where)
        pilot = self.clairvoyant or spec.pilot
        return dynoffload.offload(
            self.model, self.optimizer, pilot=pilot, config=spec.config, **where
        )

    def step(self, order: str = "") -> dict[str, Any]:
        """Make one training step and return its times, its loss and the session's statistics.

        Args:
            order: the module paths for the clairvoyant, as JSON.
        """
        if self.clairvoyant is not None:
            self.clairvoyant.tell(json.loads(order))
        args = next(self.samples).args
        begin = time.perf_counter()
        loss = self.model(*args).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        reply: dict[str, Any] = {
            "seconds": end - begin,
            "forward_s": forward - begin,
            "backward_s": backward - forward,
            "optimizer_s": end - backward,
            "loss": float(loss.item()).hex(),
        }
        if self.visited is not None:
            reply["visited"] = self.visited.copy()
            self.visited.clear()
        if self.session is not None:
            stats = dataclasses.asdict(self.session.log.steps[-1])
            reply["stats"] = {key: finite(value) for key, value in stats.items()}
        return reply

    def describe(self) -> dict[str, Any]:
        """Make one step and return its visits.

        Returns:
            The result of `step`, and ``visits``: for each call of a module with parameters, in
            order, the parameter names, and the bytes that autograd saved until the next call.
        """
        import torch

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        visits: list[list[Any]] = []
        seen: dict[int, torch.Tensor] = {}  # kept alive, so that no address is reused

        def visit(module: torch.nn.Module, args: Any) -> None:
            mine = [names[id(p)] for p in module._parameters.values() if p is not None]
            visits.append([mine, 0])

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in own and address not in seen and visits:
                seen[address] = tensor.detach()
                visits[-1][1] += storage.nbytes()
            return tensor

        handles = [
            module.register_forward_pre_hook(visit)
            for module in self.model.modules()
            if any(p is not None for p in module._parameters.values())
        ]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            reply = self.step()
        seen.clear()
        for handle in handles:
            handle.remove()
        sizes = {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in self.model.named_parameters()
        }
        return {**reply, "visits": visits, "parameters": sizes}

    def state(self) -> dict[str, Any]:
        """Return the state of the block so far; {} for plain training."""
        if self.session is None:
            return {}
        return {
            "paging": self.session.paging,
            "sizing": self.session.sizing and dataclasses.asdict(self.session.sizing),
            "peak_fast_bytes": max((s.peak_fast_bytes for s in self.session.log.steps), default=0),
        }


def finite(value: Any) -> Any:
    """Return ``value``, or None for a float that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_RUNNING: list[Trainer] = []
"""The trainer of this process."""


def build(spec: Spec) -> int:
    """Build the trainer; return the bytes charged to this process's cgroup, -1 without one."""
    from dynoffload.memory.limits import cgroup_directories

    _RUNNING.append(Trainer(spec))
    for directory, _, usage in cgroup_directories()[:1]:
        return int((directory / usage).read_text(encoding="ascii"))
    return -1


def enter() -> None:
    """Enter the block, where weights are materialized."""
    NEVER_LEFT.enter_context(_RUNNING[-1].training())


def ask(do: str, *args: str) -> dict[str, Any]:
    """Return the result of the trainer's method ``do``."""
    answer: dict[str, Any] = getattr(_RUNNING[-1], do)(*args)
    return answer
