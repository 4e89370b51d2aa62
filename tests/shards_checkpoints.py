"""What each of several processes does for `test_ranks_shards` with checkpoints of models that are
sharded or replicated. No tests here."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from shards_ranks import (
    Case,
    Network,
    block_of,
    optimizer_of,
    rank,
    said_by,
    sharded,
    state_digests,
    step_of,
)
from torch.nn.parallel import DistributedDataParallel

import dynoffload


def saves(directory: Path, given: Any, *, resumes: bool = False) -> dict[str, Any]:
    """Save after three steps, and train on; or load that, and save it again; return the end."""
    budget, options = given if isinstance(given, list) else (given, {})
    case = Case(**{"network": "moe", "width": 97, **options, "seed": 5 * resumes})
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    to: Any = {"extra": {"scheduler": scheduler}}
    torch.manual_seed(100 + rank())

    def steps(count: int) -> None:
        for _ in range(count):
            list(step_of(model, optimizer, case))
            scheduler.step()

    where = directory / "run"
    with block_of(directory, model, optimizer, budget) as session:
        if resumes:
            if session is not None:
                steps(1)  # updates that are put off, and are gone by the load
            dynoffload.load_checkpoint(model, optimizer, where, **to)
            world = torch.distributed.get_world_size()
            where = directory / f"copy{world}{'' if budget else 'plain'}"
        else:
            steps(3)
        dynoffload.save_checkpoint(model, optimizer, where, max_shard_size="1MB", **to)
        paged = session is not None and session.paging
        steps(2)
    return {"state": state_digests(model, optimizer), "paged": paged, "lr": scheduler.get_last_lr()}


def resumes(directory: Path, given: Any) -> dict[str, Any]:
    """Load what `saves` has saved, save it again, and train on; return the end."""
    return saves(directory, given, resumes=True)


def faults(directory: Path, budget: str) -> dict[str, Any]:
    """Save and load where one rank cannot; return the error of each, and how soon it came."""
    case = Case(network="dense", width=96)
    model = sharded(case)
    optimizer = optimizer_of("AdamW", model)
    list(step_of(model, optimizer, case))
    target = directory / "faulty"
    dynoffload.save_checkpoint(model, optimizer, target)
    before = (target / "checkpoint.json").read_bytes()
    digests = state_digests(model, optimizer)
    list(step_of(model, optimizer, case))
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
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = DistributedDataParallel(Network("dense", 32))
        optimizer = torch.optim.AdamW(model.parameters())
        if seed:
            dynoffload.load_checkpoint(model, optimizer, directory / "replicas")
        else:
            list(step_of(model, optimizer, Case(width=32)))
            dynoffload.save_checkpoint(model, optimizer, directory / "replicas")
        found.append(state_digests(model, optimizer))
    return {"same": found[0] == found[1], "count": len(found[0])}
