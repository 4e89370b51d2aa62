"""What each of several processes does for `test_ranks_shards`: training of models that FSDP2's
``fully_shard`` has sharded, with and without a budget. No tests here; see `shards_checkpoints`.

[Note: paths of ranks]  FSDP's collectives must match on all ranks. So what differs between ranks
differs inside of a block, whose shards all ranks gather: which experts a token takes, and whether a
block that was called does anything. What a rank did not use has a gradient of zeros there
(``set_reduce_scatter_unused_params``).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

import dynoffload
from dynoffload.distributed.sharded import beside_bytes, groups_of, reshard
from dynoffload.errors import DynOffloadError
from dynoffload.memory import heap
from dynoffload.memory.limits import resident_bytes
from dynoffload.memory.local import local, local_bytes

CLASSES, TOKENS = 10, 24


class Block(nn.Module):
    """Adds what two linear layers, or the one of six such pairs that a gate chooses, make of it.

    Args:
        kind: ``"dense"``, ``"layerdrop"`` or ``"moe"``.
        width: features.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        count = 6 if kind == "moe" else 1
        self.norm, self.drops = nn.LayerNorm(width), kind == "layerdrop"
        self.gate = nn.Linear(width, count) if count > 1 else None
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, width]`` for the same; see [Note: paths of ranks]."""
        if self.training and self.drops and float(torch.rand(())) < 0.3:
            return x
        given = self.norm(x)
        if self.gate is None:
            added: torch.Tensor = self.down[0](torch.relu(self.up[0](given)))
            return x + added
        weights, chosen = torch.softmax(self.gate(given), -1).max(-1)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                made = down(torch.relu(up(given[rows]))) * weights[rows, None]
                x = x.index_add(0, rows, made)
        return x


class Network(nn.Module):
    """Four blocks between two linear layers; a width that ranks do not divide makes shards of
    different sizes."""

    def __init__(self, kind: str, width: int = 96) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(Block(kind, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``[tokens, width]``."""
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
        accumulate: samples of a step.
        sync_last: gradients are reduced with the last sample of a step only.
        stay: parameters stay whole between the samples of a step.
        ahead: each block asks for the next one's shards as it begins.
        clip: norm to which gradients are clipped, or None.
        low: gather parameters in bfloat16, and reduce in float32.
        mesh: of the ranks; one that shards over all by default, of two dimensions the first has
            replicas of the shards.
        columns: shard matrices by columns, where the ranks divide them.
        seed: of weights.
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
    width: int = 96
    mesh: tuple[int, ...] = ()
    columns: bool = False
    seed: int = 0


def sharded(case: Case) -> nn.Module:
    """Return the network of ``case`` with each block, and the root, sharded over all ranks."""
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


def rank() -> int:
    """Return this process's rank."""
    return torch.distributed.get_rank()


def block_of(directory: Path, model: nn.Module, optimizer: Any, budget: Any, **config: Any) -> Any:
    """Return a session that spills to a directory of this rank's own; none without a budget."""
    if budget is None:
        return contextlib.nullcontext()
    own = directory / f"spill{rank()}"
    own.mkdir(exist_ok=True)
    return dynoffload.offload(model, optimizer, budget=budget, spill_dir=own, config=config)


def said_by(work: Any) -> str:
    """Return the type and text of the error that ``work`` raises, "" for none."""
    try:
        work()
    except DynOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loss_of(model: nn.Module, case: Case) -> torch.Tensor:
    """Return the loss of a batch of this rank's."""
    x, y = torch.randn(TOKENS, case.width), torch.randint(0, CLASSES, (TOKENS,))
    return nn.functional.cross_entropy(model(x).float(), y)


def step_of(model: nn.Module, optimizer: Optimizer, case: Case) -> Iterator[float]:
    """Make a step, and yield its losses."""
    for number in range(case.accumulate):
        if case.sync_last:
            model.set_requires_gradient_sync(number == case.accumulate - 1)  # type: ignore[operator]
        if case.stay:
            model.set_reshard_after_backward(number == case.accumulate - 1)  # type: ignore[operator]
        loss = loss_of(model, case)
        loss.backward()  # type: ignore[no-untyped-call]
        yield float(loss.detach())
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    optimizer.zero_grad()


def run(
    rank: int, world: int, task: Callable[[Path, Any], Any], directory: Path, value: Any
) -> Any:
    """Return what a function makes of a directory and a value."""
    return task(directory, value)


# Training


def twice(
    directory: Path,
    budget: str,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    run: Callable[[nn.Module, Optimizer, Any], list[float]],
    **config: Any,
) -> dict[str, Any]:
    """Run without a budget and under one; return what differs, of how many tensors, and whether
    anything was paged."""
    found: list[tuple[list[float], dict[str, str]]] = []
    told: dict[str, Any] = {}
    for limit in (None, budget):
        model, optimizer = make()
        with block_of(directory, model, optimizer, limit, **config) as session:
            torch.manual_seed(1000 * (rank() + 1))
            losses = run(model, optimizer, session)
            if session is not None:
                told["bytes_in"] = float(session.stats.bytes_in.sum())
        found.append((losses, state_digests(model, optimizer)))
    (plain, one), (ours, other) = found
    told["finite"] = all(map(torch.isfinite, torch.tensor(plain)))
    told["differ"] = sorted(name for name in one | other if one.get(name) != other.get(name))
    return {**told, "losses": plain == ours, "compared": len(one)}


def exact(directory: Path, cases: list[tuple[dict[str, Any], dict[str, Any], str]]) -> list[Any]:
    """Train each case."""
    found = []
    for options, config, budget in cases:
        case = Case(**options)

        def make(case: Case = case) -> tuple[nn.Module, Optimizer]:
            model = sharded(case)
            return model, optimizer_of(case.optimizer, model)

        def run(model: Any, optimizer: Any, session: Any, case: Case = case) -> list[float]:
            return [one for _ in range(case.steps) for one in step_of(model, optimizer, case)]

        found.append(twice(directory, budget, make, run, **config))
    return found


def regions(directory: Path, budget: str) -> dict[str, Any]:
    """Look at a session between backward and step, and at what ends with the block."""
    case = Case(network="dense", width=256)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    locals_before = {name: local(p) for name, p in model.named_parameters()}
    with block_of(directory, model, optimizer, budget) as session:
        activations = session._paging.activations
        for _ in range(3):
            list(step_of(model, optimizer, case))
        saved = activations.saved_bytes
        loss_of(model, case).backward()
        saved = activations.saved_bytes - saved
        parameters = dict(model.named_parameters())
        owner = session._paging.device.owner
        small = [p for p in parameters.values() if owner(p) < 0]
        result = {
            "paged": [n for n, p in parameters.items() if owner(p) >= 0],
            "own gradients": all(
                local(p.grad).untyped_storage().nbytes() == local_bytes(p.grad) for p in small
            ),
            "same parts": all(local(p) is locals_before[n] for n, p in parameters.items()),
            "saved": saved,
            "weights": sum(group.whole_bytes() for group in groups_of(model)),
            "peak": int(session.stats.peak_fast_bytes.max()),
            "budget": int(session.sizing.budget),
        }
        optimizer.step()
        optimizer.zero_grad()
        result["whole"] = list(model.blocks[0].up[0].weight.full_tensor().shape)
    list(step_of(model, optimizer, case))  # after the block it trains on
    result["after"] = bool(torch.isfinite(loss_of(model, case).detach()))
    return result


def evaluated(directory: Path, budget: str) -> dict[str, Any]:
    """Train, and evaluate between steps; give the shards other memory, as conversions do; save."""
    case = Case(network="dense", width=192)

    def make() -> tuple[nn.Module, Optimizer]:
        model = sharded(case)
        return model, optimizer_of("AdamW", model)

    def run(model: nn.Module, optimizer: Optimizer, session: Any) -> list[float]:
        losses = []
        for number in range(4):
            if number == 2:
                model._apply(torch.clone)
            losses += step_of(model, optimizer, case)
            model.eval()
            with torch.no_grad():
                losses.append(float(loss_of(model, case)))
            model.train()
        if session is not None:
            session.save(directory / "after-eval")
        return losses

    return twice(directory, budget, make, run)


def refused(directory: Path, budget: str) -> dict[str, str]:
    """Ask for what is not served; return what is said."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def entered(model: nn.Module) -> str:
        def work() -> None:
            with block_of(directory, model, torch.optim.AdamW(model.parameters()), budget):
                pass

        return said_by(work)

    said = {}
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    said["tensor parallel"] = entered(model)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    said["offload policy"] = entered(model)
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    said["meta"] = entered(model)
    return said


def late(directory: Path, budget: str) -> dict[str, Any]:
    """Train in bfloat16 by ``foreach`` a network whose second half gets gradients from the third
    step on, on all ranks alike."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).bfloat16()
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def run(model: Any, optimizer: Optimizer, session: Any) -> list[float]:
        for number in range(5):
            for part in model[2:]:
                part.requires_grad_(number > 1)
            model(torch.randn(8, 256, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    return twice(directory, budget, make, run)


def memory(directory: Path, budget: str) -> dict[str, int]:
    """Train under a budget; return the growth of the process beyond its start without shards, and
    what it is made of."""
    case = Case(network="dense", width=1024)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    heap.give_back()
    base = resident_bytes() - sum(map(local_bytes, model.parameters()))
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, resident_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    slack = 16 << 20
    with block_of(directory, model, optimizer, budget, heap_slack_bytes=slack) as session:
        for _ in range(4):
            list(step_of(model, optimizer, case))
        sizing, stats = session.sizing, session.stats
        ended.set()
        watching.join()
    return {
        "growth": peak - base,
        "budget": int(sizing.budget),
        "states": int(sizing.states_bytes),
        "fast": int(stats.peak_fast_bytes.max()),
        "slack": slack,
        "beside": beside_bytes(groups_of(model)),
    }
