"""Processes of a gloo group for tests: each runs a function of rank and world, and all must end."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

LIMIT_S = 120.0


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
    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        children = [
            context.Process(target=_rank, args=(work, rank, world, folder, given), daemon=True)
            for rank in range(world)
        ]
        for child in children:
            child.start()
        until = time.monotonic() + limit_s
        try:
            while any(child.is_alive() for child in children) and time.monotonic() < until:
                time.sleep(0.02)
                if any((Path(folder) / f"error-{rank}").exists() for rank in range(world)):
                    until = min(until, time.monotonic() + 20)
        finally:
            late = [rank for rank, child in enumerate(children) if child.is_alive()]
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()
        errors = [
            f"rank {rank}:\n{path.read_text(encoding='utf-8')}"
            for rank in range(world)
            if (path := Path(folder) / f"error-{rank}").exists()
        ]
        if errors:
            raise AssertionError("\n".join(errors))
        assert not late, f"ranks {late} did not end in {limit_s:g} s"
        return [
            torch.load(Path(folder) / f"result-{rank}", weights_only=True)
            for rank in (range(world) if only is None else only)
        ]


def _rank(
    work: Callable[..., Any], rank: int, world: int, folder: str, given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        result = work(rank, world, *given)
        torch.save(result, Path(folder) / f"result-{rank}")
    except BaseException:
        partial = Path(folder) / f".error-{rank}"
        partial.write_text(traceback.format_exc(), encoding="utf-8")
        partial.replace(Path(folder) / f"error-{rank}")
        os._exit(1)
    dist.destroy_process_group()
