"""What each of some processes runs for the tests of `DistributedDataParallel`: no tests here."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness import SMALL_PAGES, Small, footprint_of
from fused_networks import Chosen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.distributed.replicas import bucket_bytes, replicas_of
from dynoffload.errors import CheckpointError
from dynoffload.experiments.bits import first_difference, state_of

STEPS = 6


class Dropped(nn.Module):
    """Layers of which a sample says which run, as LayerDrop draws them."""

    def __init__(self, width: int = 32, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.register_buffer("seen", torch.zeros(8))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, runs: list[bool]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        self.seen[: len(runs)] += torch.tensor(runs, dtype=torch.float32)
        for layer, run in zip(self.layers, runs, strict=True):
            if run:
                x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def all_layers(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a sample of this rank's that runs every layer."""
    x = torch.randn(4, 32, generator=_generator(step, rank))
    return (model(x, [True] * 5) ** 2).mean()


def some_layers(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a sample whose layers are this rank's own; every third runs none."""
    generator = _generator(step, rank)
    drawn = torch.rand(5, generator=generator) < 0.5
    runs = [False] * 5 if step % 3 == 2 and rank else drawn.tolist()
    return (model(torch.randn(4, 32, generator=generator), runs) ** 2).mean()


def routed(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of some tokens, which choose experts."""
    row = torch.randint(0, 64, (2, 3), generator=_generator(step, rank))
    return F.cross_entropy(model(row[0]), row[1])


def slices(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a sample that hits experts of this rank's own."""
    generator = _generator(step, rank)
    hit = sorted({int(n) for n in torch.randint(0, 6, (2,), generator=generator)})
    out: Tensor = model(torch.randn(5, 32, generator=generator), hit)
    return (out**2).mean()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of most cases."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return one whose first momentum is the gradient."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Case:
    """One loop, run plainly and inside a block.

    Attributes:
        make: makes the network.
        loss: of a sample, by model, step and rank.
        wrap: arguments of `DistributedDataParallel`.
        optimizer: makes it.
        accumulate: backward passes in a step; all but the last under ``no_sync()``.
        clip: norm to clip to.
        to_none: as ``zero_grad`` takes it.
        config: of the session.
        share: of the footprint, beside the buckets.
        looks: compare all state after every step.
        aside: ranks whose budget holds everything, so that paging steps aside.
        hook: a communication hook of the user's.
        steps: of the first rank.
        joins: the others run out of samples two steps earlier, under ``join()``.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    wrap: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    accumulate: int = 1
    clip: float | None = None
    to_none: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    share: float = 0.3
    looks: bool = False
    aside: tuple[int, ...] = ()
    hook: bool = False
    steps: int = STEPS
    joins: bool = False

    def steps_of(self, rank: int) -> int:
        """Return the steps that a rank makes."""
        return self.steps - 2 * (self.joins and rank > 0)


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
CASES = {
    "adamw": Case(Dropped, all_layers),
    "sgd": Case(Dropped, all_layers, optimizer=sgd, clip=0.1),
    "static": Case(Dropped, all_layers, {"static_graph": True}, clip=0.1),
    "unused-clip": Case(Dropped, some_layers, UNUSED, clip=0.1, accumulate=2, looks=True),
    "unused-zeros": Case(Dropped, some_layers, UNUSED, to_none=False, optimizer=sgd),
    "no-sync": Case(Dropped, all_layers, accumulate=3),
    "views": Case(Dropped, all_layers, VIEWS, clip=0.1),
    "views-unused": Case(Dropped, some_layers, {**VIEWS, **UNUSED}, accumulate=2, steps=9),
    "small-buckets": Case(Dropped, some_layers, {**UNUSED, "bucket_cap_mb": 0.02}),
    "mapped": Case(Dropped, some_layers, UNUSED, config={"backend": "mapped"}),
    "on-demand": Case(Dropped, some_layers, UNUSED, config={"policy": "on-demand"}),
    "rollback": Case(Dropped, some_layers, UNUSED, config={"rollback": True}),
    "routed-clip": Case(Small, routed, UNUSED, clip=0.1, accumulate=2),
    "fused": Case(Chosen, slices, UNUSED, steps=12),
    "fused-looks": Case(Chosen, slices, UNUSED, clip=0.1, accumulate=2, looks=True),
    "fused-zeros": Case(Chosen, slices, UNUSED, to_none=False, optimizer=sgd),
    "aside": Case(Dropped, all_layers, config={"step_aside": True}, aside=(0,), steps=8),
    "hooked": Case(Dropped, all_layers, hook=True),
    "join": Case(Dropped, some_layers, UNUSED, joins=True),
}


def halved(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations: none as text
    """Reduce a bucket as a user might: at half its precision."""
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16) / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def trained(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Any:
    """Yield what is to be compared, after every step."""
    for step in range(case.steps_of(rank)):
        losses = []
        for part in range(case.accumulate):
            last = part == case.accumulate - 1
            assert isinstance(model, DistributedDataParallel)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = case.loss(model, step * case.accumulate + part, rank) / case.accumulate
                loss.backward()
            losses.append(loss.detach().clone())
        norm = None
        if case.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip).clone()
        optimizer.step()
        looked = state_of(model, optimizer) if case.looks else {}
        optimizer.zero_grad(set_to_none=case.to_none)
        yield {"losses": losses, "norm": norm, **looked}


def all_of(case: Case, model: DistributedDataParallel, optimizer: Any, rank: int) -> list[Any]:
    """Train, and return what is to be compared."""
    with model.join() if case.joins else contextlib.nullcontext():
        return list(trained(case, model, optimizer, rank))


def wrapped(case: Case, model: nn.Module) -> DistributedDataParallel:
    """Return ``model`` replicated."""
    ddp = DistributedDataParallel(model, **case.wrap)
    if case.hook:
        ddp.register_comm_hook(None, halved)
    return ddp


def run(case: Case, rank: int, directory: Path) -> dict[str, Any]:
    """Train a case twice and return what differs, and what the session says of itself."""
    torch.manual_seed(0)
    model = case.make()
    reference = copy.deepcopy(model)
    plain, ddp = wrapped(case, reference), wrapped(case, model)
    its, optimizer = case.optimizer(plain.parameters()), case.optimizer(ddp.parameters())
    torch.manual_seed(rank)
    expected = all_of(case, plain, its, rank)
    drawn = torch.get_rng_state()
    torch.manual_seed(rank)
    buckets = bucket_bytes(replicas_of(ddp))
    share = 8.0 if rank in case.aside else case.share
    budget = buckets + int(footprint_of(model) * share)
    config = {**SMALL_PAGES, "step_aside": False, **case.config}
    spill = directory / f"spill-{rank}"
    spill.mkdir(exist_ok=True)
    with dynoffload.offload(
        ddp, optimizer, budget=budget, config=config, spill_dir=spill
    ) as session:
        found = all_of(case, ddp, optimizer, rank)
        stats, pages = session.stats, session.paging
        assert session.model is model
    differs = first_difference(found, expected, "trained")
    differs = differs or first_difference(state_of(ddp, optimizer), state_of(plain, its), "after")
    differs = differs or first_difference(torch.get_rng_state(), drawn, "random numbers")
    return {
        "differs": differs,
        "pages": pages,
        "bytes_in": int(stats["bytes_in"].sum()),
        "peak": int(stats["peak_fast_bytes"].max()),
        "budget": budget,
        "buckets": buckets,
        "steps": len(stats),
    }


def cases(rank: int, world: int, directory: str, names: list[str]) -> dict[str, Any]:
    """Run the cases."""
    return {name: run(CASES[name], rank, Path(directory)) for name in names}


def saved(rank: int, world: int, directory: str, head_too: bool, pages: bool) -> dict[str, Any]:
    """Save a model of which a part is a replica, once more with equal heads where that is refused;
    load, and compare."""
    torch.manual_seed(0)
    model = nn.Sequential(DistributedDataParallel(nn.Linear(64, 64)), nn.Linear(64, 2))
    if head_too:
        model[1] = DistributedDataParallel(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block: Any = contextlib.nullcontext()
    if pages:
        config = {**SMALL_PAGES, "step_aside": False}
        block = dynoffload.offload(model, optimizer, budget="1MiB", config=config, pilot=None)
    said, where = "", Path(directory) / "common"
    with block:
        torch.manual_seed(rank)
        model(torch.randn(2, 64)).square().sum().backward()
        optimizer.step()
        try:
            dynoffload.save_checkpoint(model, optimizer, where)
        except CheckpointError as error:
            said = str(error)
            for parameter in model[1].parameters():
                dist.broadcast(parameter.data, 0)
            dynoffload.save_checkpoint(model, optimizer, where)
        kept = copy.deepcopy(model.state_dict())
        dist.barrier()
        for parameter in model.parameters():
            parameter.data.zero_()
        dynoffload.load_checkpoint(model, optimizer, where)
        same = not first_difference(dict(model.state_dict()), dict(kept), "loaded")
    return {"refused": said, "same": same}
