"""What each of several processes does for `test_ranks_shards`: a function for each test."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from sharded_training import (
    CLASSES,
    TOKENS,
    Case,
    Network,
    Run,
    optimizer_of,
    sharded,
    state_digests,
    train_sharded,
)
from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.distributed.sharded import beside_bytes, groups_of
from dynoffload.errors import DynOffloadError
from dynoffload.memory import heap
from dynoffload.memory.limits import resident_bytes
from dynoffload.memory.local import local, local_bytes


def tasks(rank: int, world: int, given: list[tuple[str, str, Any]]) -> list[Any]:
    """Call the functions that are named, with a directory and a value; return what they return."""
    found = []
    for number, (task, directory, value) in enumerate(given):
        if number:
            torch.distributed.barrier()
        found.append(globals()[task](Path(directory), value))
    return found


def rank() -> int:
    """Return this process's rank."""
    return torch.distributed.get_rank()


def spill(directory: Path) -> Path:
    """Return this rank's own spill directory."""
    own = directory / f"spill{rank()}"
    own.mkdir(exist_ok=True)
    return own


def said_by(work: Any) -> str:
    """Return the type and text of the error that ``work`` raises, "" for none."""
    try:
        work()
    except DynOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


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


def _loss(model: nn.Module, case: Case) -> torch.Tensor:
    x, y = torch.randn(TOKENS, case.width), torch.randint(0, CLASSES, (TOKENS,))
    return nn.functional.cross_entropy(model(x), y)


def _step(model: nn.Module, optimizer: Optimizer, case: Case) -> None:
    _loss(model, case).backward()
    optimizer.step()
    optimizer.zero_grad()


def regions(directory: Path, budget: str) -> dict[str, Any]:
    """Look at a session between backward and step, and at what ends with the block."""
    case = Case(network="dense", width=256)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    locals_before = {name: local(p) for name, p in model.named_parameters()}
    with dynoffload.offload(model, optimizer, budget=budget, spill_dir=spill(directory)) as session:
        activations = session._paging.activations
        for _ in range(3):
            _step(model, optimizer, case)
        saved = activations.saved_bytes
        _loss(model, case).backward()
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
    _step(model, optimizer, case)  # after the block it trains on
    result["after"] = bool(torch.isfinite(_loss(model, case).detach()))
    return result


def evaluated(directory: Path, budget: str) -> list[float]:
    """Train, evaluate between steps, thaw; return losses of both, with and without a budget."""
    found = []
    case = Case(network="dense", width=192)
    for limit in (None, budget):
        model = sharded(case)
        optimizer = optimizer_of("AdamW", model)
        torch.manual_seed(rank())
        losses: list[float] = []

        def run(model: nn.Module, optimizer: Optimizer, losses: list[float]) -> None:
            for _ in range(3):
                _step(model, optimizer, case)
                model.eval()
                with torch.no_grad():
                    losses.append(float(_loss(model, case)))
                model.train()

        if limit is None:
            run(model, optimizer, losses)
        else:
            with dynoffload.offload(
                model, optimizer, budget=limit, spill_dir=spill(directory)
            ) as session:
                run(model, optimizer, losses)
                session.save(directory / "after-eval")
        found.append([losses, state_digests(model, optimizer)])
    return [found[0] == found[1], len(found[0][1])]


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
    step on, on all ranks alike; return whether all is equal to the same without a budget."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for limit in (None, budget):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(256, 256) for name in "abcd"}).bfloat16()
        model = nn.Sequential(*model.values())
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        block: Any = contextlib.nullcontext()
        if limit is not None:
            block = dynoffload.offload(model, optimizer, budget=limit, spill_dir=spill(directory))
        torch.manual_seed(rank())
        with block:
            for number in range(5):
                for part in model[2:]:
                    part.requires_grad_(number > 1)
                x = torch.randn(8, 256, dtype=torch.bfloat16)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(state_digests(model, optimizer))
    return [found[0] == found[1], len(found[0])]


def replaced(directory: Path, budget: str) -> list[Any]:
    """Give the shards other memory in mid-run, as conversions do; return whether all is equal to
    the same without a budget."""
    case = Case(network="dense", width=192)
    found = []
    for limit in (None, budget):
        model = sharded(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        block: Any = contextlib.nullcontext()
        if limit is not None:
            block = dynoffload.offload(model, optimizer, budget=limit, spill_dir=spill(directory))
        torch.manual_seed(rank())
        losses = []
        with block:
            for number in range(4):
                if number == 2:
                    model._apply(torch.clone)
                loss = _loss(model, case)
                loss.backward()
                losses.append(float(loss))
                optimizer.step()
                optimizer.zero_grad()
        found.append([losses, state_digests(model, optimizer)])
    return [found[0] == found[1], len(found[0][1])]


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
            _step(model, optimizer, case)
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


# Checkpoints


def saves(directory: Path, given: Any) -> dict[str, Any]:
    """Save after three steps, and train on; return the end."""
    budget, options = given if isinstance(given, list) else (given, {})
    case = Case(**{"network": "moe", "width": 97, **options})
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(100 + rank())
    with dynoffload.offload(model, optimizer, budget=budget, spill_dir=spill(directory)) as session:
        for _ in range(3):
            _step(model, optimizer, case)
            scheduler.step()
        session.save(directory / "run", extra={"scheduler": scheduler}, max_shard_size="1MB")
        paged = session.paging
        for _ in range(2):
            _step(model, optimizer, case)
            scheduler.step()
    return {"state": state_digests(model, optimizer), "paged": paged, "lr": scheduler.get_last_lr()}


def resumes(directory: Path, given: Any) -> dict[str, Any]:
    """Load what `saves` has saved, save it again, and train on; return the end."""
    budget, options = given if isinstance(given, list) else (given, {})
    case = Case(**{"network": "moe", "width": 97, **options, "seed": 5})  # until it is loaded
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    extra = {"scheduler": scheduler}
    world = torch.distributed.get_world_size()
    copy = directory / f"copy{world}{'' if budget else 'plain'}"
    if budget is None:
        dynoffload.load_checkpoint(model, optimizer, directory / "run", extra=extra)
        dynoffload.save_checkpoint(model, optimizer, copy, extra=extra, max_shard_size="1MB")
        for _ in range(2):
            _step(model, optimizer, case)
            scheduler.step()
    else:
        with dynoffload.offload(
            model, optimizer, budget=budget, spill_dir=spill(directory)
        ) as session:
            _step(model, optimizer, case)  # updates that are put off, and are gone by the load
            session.load(directory / "run", extra=extra)
            session.save(copy, extra=extra, max_shard_size="1MB")
            for _ in range(2):
                _step(model, optimizer, case)
                scheduler.step()
    return {"state": state_digests(model, optimizer), "lr": scheduler.get_last_lr()}


def faults(directory: Path, budget: str) -> dict[str, Any]:
    """Save and load where one rank cannot; return what each is told, and how soon."""
    case = Case(network="dense", width=96)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    _step(model, optimizer, case)
    target = directory / "faulty"
    dynoffload.save_checkpoint(model, optimizer, target)
    before = (target / "checkpoint.json").read_bytes()
    digests = state_digests(model, optimizer)
    _step(model, optimizer, case)
    begin = time.monotonic()
    said = {}
    extra: dict[str, Any] = {"thing": object()} if rank() else {}
    said["save"] = said_by(
        lambda: dynoffload.save_checkpoint(model, optimizer, target, extra=extra)
    )
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank():  # its parts lie further on in the files
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    said["disk"] = said_by(lambda: dynoffload.save_checkpoint(model, optimizer, target))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    said["kept"] = (target / "checkpoint.json").read_bytes() == before
    said["leftovers"] = sorted(path.name for path in directory.glob(".faulty*"))
    elsewhere = directory / "nowhere" if rank() else target
    now = state_digests(model, optimizer)
    said["elsewhere"] = said_by(lambda: dynoffload.load_checkpoint(model, optimizer, elsewhere))
    said["load"] = said_by(
        lambda: dynoffload.load_checkpoint(model, optimizer, target, extra=extra)
    )
    said["untouched"] = state_digests(model, optimizer) == now
    other = sharded(Case(network="dense", width=96 if rank() else 104))
    said["unlike"] = said_by(lambda: dynoffload.save_checkpoint(other, None, target))
    dynoffload.load_checkpoint(model, optimizer, target)
    said["loaded"] = state_digests(model, optimizer) == digests
    said["seconds"] = time.monotonic() - begin
    return said


def dies(directory: Path, budget: str) -> str:
    """Save where the other rank has ended; return what is said."""
    model = sharded(Case(network="dense", width=96))
    torch.distributed.barrier()
    if not rank():
        return said_by(lambda: dynoffload.save_checkpoint(model, None, directory / "alone"))
    os._exit(0)


def replicas(directory: Path, budget: str) -> dict[str, Any]:
    """Save replicas of `DistributedDataParallel`, and load them into other ones."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Network("dense", 32))
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, Case(width=32)).backward()
    optimizer.step()
    dynoffload.save_checkpoint(model, optimizer, directory / "replicas")
    torch.manual_seed(1)
    other = nn.parallel.DistributedDataParallel(Network("dense", 32))
    fresh = torch.optim.AdamW(other.parameters())
    dynoffload.load_checkpoint(other, fresh, directory / "replicas")
    same = state_digests(other, fresh) == state_digests(model, optimizer)
    return {"same": same, "count": len(state_digests(other, fresh))}
