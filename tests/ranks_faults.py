"""What one of two processes runs in which the second is lost: no tests here.

The first rank writes what its block raised; the second does as ``kind`` says in the forward of its
fourth step. For ``"store"`` it is the other way round, and the first rank, which is killed, holds
the store.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness import SMALL_PAGES, footprint_of
from ranks_worker import Dropped, adamw, all_layers
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.distributed import watchdog
from dynoffload.errors import RankError

AT, TIMEOUT_S, HANGS_S = 3, 4, 60


class Lost(Exception):
    """What a script of the user's might raise."""


def do(kind: str) -> None:
    """Be lost."""
    if kind in ("kill", "store"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(HANGS_S)
    if kind == "raise":
        raise Lost("of the second rank")


def main(directory: Path, rank: int, kind: str) -> None:
    """Train until the second rank is lost; what is said is in a file."""
    os.dup2(os.open(directory / f"said-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=300)
    store, loser = f"file://{directory / 'store'}", 1
    if kind == "store":
        store, loser = (directory / "address").read_text(), 0
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=patience)
    own = dist.new_group(timeout=patience)
    model = Dropped()
    ddp = DistributedDataParallel(model)
    optimizer = adamw(ddp.parameters())
    config: dict[str, Any] = {**SMALL_PAGES, "step_aside": False, "rank_timeout": TIMEOUT_S}
    spill = directory / f"spill-{rank}"
    spill.mkdir()
    began = time.monotonic()
    step = 0

    def lose(module: torch.nn.Module, args: Any) -> None:
        nonlocal began
        if step == AT:
            began = time.monotonic()
            if rank == loser:
                do(kind)

    model.layers[2][2].register_forward_pre_hook(lose)
    budget = footprint_of(model) // 2
    try:
        with dynoffload.offload(
            ddp, optimizer, budget=budget, config=config, spill_dir=spill
        ) as session:
            for step in range(AT + 3):
                if rank and kind == "leave" and step == AT:
                    break
                if kind == "barrier" and step == AT:
                    time.sleep(HANGS_S) if rank else dist.barrier(own)
                all_layers(ddp, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session.paging
    except RankError as error:
        found = {
            "words": str(error),
            "rank": error.rank,
            "lost": error.lost,
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - began,
        }
        (directory / f"{rank}.json").write_text(json.dumps(found))
        raise
    if kind == "leave":
        time.sleep(HANGS_S)  # as one that goes on to evaluate


def waiting(rank: int, world: int) -> list[str]:
    """Have the first rank wait for the second, for longer than the default group
    allows; return what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynoffload").addHandler(handler)
    watchdog._MOMENT_S = 0.5
    own = dist.new_group(timeout=datetime.timedelta(minutes=3))
    watchdog._set(dist.group.WORLD, datetime.timedelta(seconds=1))
    model = torch.nn.Linear(8, 8)
    with dynoffload.offload(model, budget="1MiB"):
        if rank:
            time.sleep(8)
        dist.barrier(own)
        dist.barrier(own)
    return said
