"""Processes of a gloo group for tests: each runs a function of rank and world, or a script."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import FORKED

LIMIT_S = 120.0
_GRACE_S = 20.0  # after one rank has failed, in which others say why


def run_ranks(
    work: Callable[..., Any],
    world: int,
    *given: Any,
    limit_s: float = LIMIT_S,
    only: tuple[int, ...] | None = None,
) -> list[Any]:
    """Return what ``work(rank, world, *given)`` returns in each of ``world`` processes.

    An exception of a rank is raised here with its trace; ranks that are not done in time are ended,
    which is a failure. ``only`` names the ranks whose results are asked for; others may die.
    """
    wanted = range(world) if only is None else only
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            FORKED.Process(target=_run, args=(work, rank, world, folder, given))
            for rank in range(world)
        ]
        try:
            for one in ranks:
                one.start()
            until = time.monotonic() + limit_s
            while (left := until - time.monotonic()) > 0:
                alive = [one for one in ranks if one.is_alive()]
                if not any(ranks[rank] in alive for rank in wanted):
                    break
                wait([one.sentinel for one in alive], left)
                if any(folder.glob("*.error")):
                    until = min(until, time.monotonic() + _GRACE_S)
        finally:
            for one in ranks:
                if one.pid:
                    one.kill()
                    one.join()
        errors = [f"{path.stem}:\n{path.read_text()}" for path in sorted(folder.glob("*.error"))]
        if errors:
            raise AssertionError("\n".join(errors))
        late = [rank for rank in wanted if not (folder / f"rank {rank}.pt").exists()]
        assert not late, f"ranks {late} did not end in {limit_s:g} s"
        return [torch.load(folder / f"rank {rank}.pt", weights_only=True) for rank in wanted]


def _run(
    work: Callable[..., Any], rank: int, world: int, folder: Path, given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        result = work(rank, world, *given)
    except BaseException:
        (folder / f"rank {rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    torch.save(result, folder / f"rank {rank}.pt")
    del result
    gc.collect()  # what holds the group is let go before it
    dist.destroy_process_group()


def run_script(folder: Path, script: str, *words: str) -> str:
    """Run a script in two processes as a launcher would; return what both have printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"printed{rank}" for rank in range(2)]
    ranks = [
        FORKED.Process(target=_run_script, args=(rank, port, script, words, file))
        for rank, file in enumerate(files)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(LIMIT_S)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    assert codes == [0, 0]
    return "".join(file.read_text() for file in files)


def _run_script(rank: int, port: int, script: str, words: tuple[str, ...], printed: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    sys.argv = [script, *words]
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")
