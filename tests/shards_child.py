"""What each of several processes does for `test_ranks_shards`: a function for each test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shards_saving
import torch
from sharded_training import (
    Case,
    Run,
    loss_of,
    optimizer_of,
    rank,
    said_by,
    sharded,
    spill,
    state_digests,
    step_of,
    train_sharded,
)
from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.distributed.sharded import beside_bytes, groups_of
from dynoffload.memory import heap
from dynoffload.memory.limits import resident_bytes
from dynoffload.memory.local import local, local_bytes


def tasks(rank: int, world: int, given: list[tuple[str, str, Any]]) -> list[Any]:
    """Call the functions that are named, with a directory and a value; return what they return."""
    found = []
    for number, (task, directory, value) in enumerate(given):
        if number:
            torch.distributed.barrier()
        function = getattr(shards_saving, task, None) or globals()[task]
        found.append(function(Path(directory), value))
    return found


def exact(directory: Path, cases: list[tuple[dict[str, Any], dict[str, Any], str]]) -> list[Any]:
    """Train each case without a budget and under one; return what differs, and the traffic."""
    found = []
    for options, config, budget in cases:
        case = Case(**options)
        plain = train_sharded(case, budget=None)
        ours = train_sharded(case, budget=budget, spill_dir=spill(directory), config=config)
        found.append(
            {
                "losses": plain.losses == ours.losses,
                "finite": all(map(torch.isfinite, torch.tensor(plain.losses))),
                "differ": _different(plain, ours),
                "compared": len(plain.state),
                **ours.stats,
            }
        )
    return found


def _different(one: Run, other: Run) -> list[str]:
    names = one.state.keys() | other.state.keys()
    return sorted(name for name in names if one.state.get(name) != other.state.get(name))


def regions(directory: Path, budget: str) -> dict[str, Any]:
    """Look at a session between backward and step, and at what ends with the block."""
    case = Case(network="dense", width=256)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    locals_before = {name: local(p) for name, p in model.named_parameters()}
    with dynoffload.offload(model, optimizer, budget=budget, spill_dir=spill(directory)) as session:
        activations = session._paging.activations
        for _ in range(3):
            step_of(model, optimizer, case)
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
        whole = model.blocks[0].inner.up.weight.full_tensor().detach()
        result["whole"] = list(whole.shape)
    step_of(model, optimizer, case)  # after the block it trains on
    result["after"] = bool(torch.isfinite(loss_of(model, case).detach()))
    return result


def _twice(
    directory: Path,
    budget: str,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    run: Callable[[nn.Module, Optimizer, Any], list[float]],
) -> list[Any]:
    """Run without a budget and under one; return whether all is equal, and of how many tensors."""
    found = []
    for limit in (None, budget):
        model, optimizer = make()
        block: Any = contextlib.nullcontext()
        if limit is not None:
            block = dynoffload.offload(model, optimizer, budget=limit, spill_dir=spill(directory))
        torch.manual_seed(rank())
        with block as session:
            losses = run(model, optimizer, session)
        found.append([losses, state_digests(model, optimizer)])
    return [found[0] == found[1], len(found[0][1])]


def evaluated(directory: Path, budget: str) -> list[Any]:
    """Train, and evaluate between steps; save after that."""
    case = Case(network="dense", width=192)

    def make() -> tuple[nn.Module, Optimizer]:
        model = sharded(case)
        return model, optimizer_of("AdamW", model)

    def run(model: nn.Module, optimizer: Optimizer, session: Any) -> list[float]:
        losses = []
        for _ in range(3):
            step_of(model, optimizer, case)
            model.eval()
            with torch.no_grad():
                losses.append(float(loss_of(model, case)))
            model.train()
        if session is not None:
            session.save(directory / "after-eval")
        return losses

    return _twice(directory, budget, make, run)


def refused(directory: Path, budget: str) -> dict[str, str]:
    """Ask for what is not served; return what is said."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def entered(model: nn.Module, **options: Any) -> str:
        def work() -> None:
            optimizer = torch.optim.AdamW(model.parameters())
            with dynoffload.offload(
                model, optimizer, budget=budget, spill_dir=spill(directory), **options
            ):
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


def late(directory: Path, budget: str) -> list[Any]:
    """Train in bfloat16 by ``foreach`` a network whose second half gets gradients from the third
    step on, on all ranks alike."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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

    return _twice(directory, budget, make, run)


def replaced(directory: Path, budget: str) -> list[Any]:
    """Give the shards other memory in mid-run, as conversions do."""
    case = Case(network="dense", width=192)

    def make() -> tuple[nn.Module, Optimizer]:
        model = sharded(case)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model: nn.Module, optimizer: Optimizer, session: Any) -> list[float]:
        losses = []
        for number in range(4):
            if number == 2:
                model._apply(torch.clone)
            loss = loss_of(model, case)
            loss.backward()
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return _twice(directory, budget, make, run)


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
    with dynoffload.offload(
        model,
        optimizer,
        budget=budget,
        spill_dir=spill(directory),
        config={"heap_slack_bytes": slack},
    ) as session:
        for _ in range(4):
            step_of(model, optimizer, case)
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
