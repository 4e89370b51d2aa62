"""Sharded training over processes: FSDP2's ``fully_shard``, with and without a budget.

[Note: paths of ranks]  FSDP's collectives must match on all ranks. So what differs between ranks
differs inside of a block, whose shards all ranks gather: which experts a token takes, and whether a
block that was called does anything. What a rank did not use has a gradient of zeros there
(``set_reduce_scatter_unused_params``).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.distributed.sharded import reshard
from dynoffload.memory.local import local

WIDTH, BLOCKS, EXPERTS, CLASSES, TOKENS = 96, 4, 6, 10, 24
NETWORKS = ("dense", "layerdrop", "moe")


class Feed(nn.Module):
    """Two linear layers.

    Args:
        width: features in and out; four times as many between.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is to be added to ``x`` (tokens x width)."""
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return down


class Experts(nn.Module):
    """One expert for each token, by a gate.

    Args:
        width: features.
        count: experts.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(Feed(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is to be added to ``x`` (tokens x width)."""
        weights, chosen = torch.softmax(self.gate(x), -1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Block(nn.Module):
    """A residual layer.

    Args:
        inner: what it adds.
        width: features.
        drops: whether it may do nothing in training; see [Note: paths of ranks].
    """

    def __init__(self, inner: nn.Module, width: int, *, drops: bool) -> None:
        super().__init__()
        self.norm, self.inner, self._drops = nn.LayerNorm(width), inner, drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` (tokens x width), and what the layer adds."""
        if self.training and self._drops and float(torch.rand(())) < 0.3:
            return x
        added: torch.Tensor = self.inner(self.norm(x))
        return x + added


class Network(nn.Module):
    """Blocks between two linear layers.

    Args:
        kind: of `NETWORKS`.
        width: features; one that the ranks do not divide leaves them shards of different sizes.
    """

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(
            Block(
                Experts(width, EXPERTS) if kind == "moe" else Feed(width),
                width,
                drops=kind == "layerdrop",
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``x`` (tokens x width)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.last(x)
        return logits


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    """Return the optimizer called ``name``, with a momentum for SGD; Muon steps matrices alone."""
    if name == "Muon":
        return torch.optim.Muon([one for one in model.parameters() if one.dim() == 2], lr=1e-2)
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "AdamW(fused)":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    kind: Callable[..., Optimizer] = getattr(torch.optim, name)
    return kind(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One training run, on every rank alike.

    Attributes:
        network: of `NETWORKS`.
        optimizer: as of `optimizer_of`.
        steps: of the optimizer.
        accumulate: samples of a step.
        sync_last: gradients are reduced with the last sample of a step only.
        stay: parameters stay whole between the samples of a step.
        ahead: each block asks for the next one's shards as it begins.
        clip: norm to which gradients are clipped, or None.
        low: gather parameters in bfloat16, and reduce in float32.
        width: features.
        mesh: of the ranks; one that shards over all by default, of two dimensions the first has
            replicas of the shards.
        columns: shard matrices by columns, where the ranks divide them.
        seed: of weights, and of data with the rank.
    """

    network: str = "moe"
    optimizer: str = "AdamW"
    steps: int = 6
    accumulate: int = 1
    sync_last: bool = False
    stay: bool = False
    ahead: bool = False
    clip: float | None = None
    low: bool = False
    width: int = WIDTH
    mesh: tuple[int, ...] = ()
    columns: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What a run has left on one rank.

    Attributes:
        losses: of each sample.
        state: digests of this rank's parts of parameters and optimizer state, by name.
        stats: of the session: bytes in and out, and the highest fast bytes; empty without one.
    """

    losses: list[float]
    state: dict[str, str]
    stats: dict[str, float]


def sharded(case: Case) -> nn.Module:
    """Return the network of ``case`` with each block, and the root, sharded over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(case.seed)
    model = Network(case.network, case.width)
    world = torch.distributed.get_world_size()
    shape = tuple(case.mesh) or (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])

    def placed(parameter: nn.Parameter) -> Shard | None:
        even = parameter.dim() > 1 and parameter.shape[1] % world == 0
        return Shard(1) if even else None

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if case.low else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        placement = placed if case.columns else None
        fully_shard(part, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
        part.set_reduce_scatter_unused_params(True)
    for one, following in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        if case.ahead:
            one.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    return model


def state_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return digests of this rank's parts of parameters and optimizer state."""
    reshard(model)
    names: dict[torch.Tensor, str] = {one: name for name, one in model.named_parameters()}
    found = {name: _digest(parameter) for parameter, name in names.items()}
    for parameter, entry in optimizer.state.items():
        found |= {f"{names[parameter]}.{key}": _digest(value) for key, value in entry.items()}
    return found


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    part = local(value.detach()).contiguous()
    return hashlib.sha256(
        part.view(torch.uint8).numpy().tobytes() if part.dim() else str(part.item()).encode()
    ).hexdigest()


def train_sharded(
    case: Case,
    *,
    budget: int | str | None,
    spill_dir: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Train ``case`` on this rank, in the process group that there is.

    Args:
        case: the run.
        budget: of this rank, in bytes or as a text; None trains without dynoffload.
        spill_dir: for what does not fit, of this rank.
        config: options, as of `dynoffload.offload`.

    Returns:
        What is compared between a run under a budget and one without: both are to be equal.
    """
    model = sharded(case)
    optimizer = optimizer_of(case.optimizer, model)
    block: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if budget is not None:
        block = dynoffload.offload(
            model, optimizer, budget=budget, spill_dir=spill_dir, config=config
        )
    torch.manual_seed(case.seed + 1000 * (torch.distributed.get_rank() + 1))
    stats: dict[str, float] = {}
    with block as session:
        losses = [loss for _ in range(case.steps) for loss in _step(case, model, optimizer)]
        if session is not None:
            rows = session.stats
            stats = {
                "bytes_in": float(rows.bytes_in.sum()),
                "bytes_out": float(rows.bytes_out.sum()),
                "peak_fast_bytes": float(rows.peak_fast_bytes.max()),
                "paging": float(session.paging),
            }
    return Run(losses, state_digests(model, optimizer), stats)


def _step(case: Case, model: nn.Module, optimizer: Optimizer) -> Iterator[float]:
    for number in range(case.accumulate):
        if case.sync_last:
            model.set_requires_gradient_sync(number == case.accumulate - 1)  # type: ignore[operator]
        if case.stay:
            model.set_reshard_after_backward(number == case.accumulate - 1)  # type: ignore[operator]
        x = torch.randn(TOKENS, case.width)
        y = torch.randint(0, CLASSES, (TOKENS,))
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        yield float(loss)
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    optimizer.zero_grad()
