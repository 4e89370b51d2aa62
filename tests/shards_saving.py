"""What each of several processes does of checkpoints for `test_ranks_shards`."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from sharded_training import (
    Case,
    Network,
    loss_of,
    optimizer_of,
    rank,
    said_by,
    sharded,
    spill,
    state_digests,
    step_of,
)
from torch import nn

import dynoffload


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
            step_of(model, optimizer, case)
            scheduler.step()
        session.save(directory / "run", extra={"scheduler": scheduler}, max_shard_size="1MB")
        paged = session.paging
        for _ in range(2):
            step_of(model, optimizer, case)
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
            step_of(model, optimizer, case)
            scheduler.step()
    else:
        with dynoffload.offload(
            model, optimizer, budget=budget, spill_dir=spill(directory)
        ) as session:
            step_of(model, optimizer, case)  # updates that are put off, and are gone by the load
            session.load(directory / "run", extra=extra)
            session.save(copy, extra=extra, max_shard_size="1MB")
            for _ in range(2):
                step_of(model, optimizer, case)
                scheduler.step()
    return {"state": state_digests(model, optimizer), "lr": scheduler.get_last_lr()}


def faults(directory: Path, budget: str) -> dict[str, Any]:
    """Save and load where one rank cannot; return the error of each, and how soon it came."""
    case = Case(network="dense", width=96)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    step_of(model, optimizer, case)
    target = directory / "faulty"
    dynoffload.save_checkpoint(model, optimizer, target)
    before = (target / "checkpoint.json").read_bytes()
    digests = state_digests(model, optimizer)
    step_of(model, optimizer, case)
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
    loss_of(model, Case(width=32)).backward()
    optimizer.step()
    dynoffload.save_checkpoint(model, optimizer, directory / "replicas")
    torch.manual_seed(1)
    other = nn.parallel.DistributedDataParallel(Network("dense", 32))
    fresh = torch.optim.AdamW(other.parameters())
    dynoffload.load_checkpoint(other, fresh, directory / "replicas")
    same = state_digests(other, fresh) == state_digests(model, optimizer)
    return {"same": same, "count": len(state_digests(other, fresh))}
