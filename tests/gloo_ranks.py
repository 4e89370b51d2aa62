"""Processes of a gloo group for tests: each runs a function of rank and world.

The processes stay for later calls, as most of a short test's time is their start and torch's
import; each call has a group of its own. A call that names ``only`` some ranks has processes of its
own, as others may die. A call that fails ends the processes, and the next one has new ones.
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

LIMIT_S = 120.0
_GRACE_S = 20.0  # after one rank has failed, in which others say why


class _Rank:
    """A process that carries out one piece of work after another."""

    def __init__(self) -> None:
        context = processes.get_context("spawn")
        self.line: Connection
        self.line, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.line.close()


_kept: list[_Rank] = []
_calls = itertools.count()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return where groups meet; a group looks for its file until it ends, after its call."""
    return tempfile.TemporaryDirectory()


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
    if only is None:
        for dead in [one for one in _kept if not one.alive]:  # after its last call
            dead.end()
            _kept.remove(dead)
        _kept.extend(_Rank() for _ in range(world - len(_kept)))
        ranks = _kept[:world]
    else:
        ranks = [_Rank() for _ in range(world)]
    found: dict[int, Any] = {}
    try:
        store = f"file://{_folder().name}/{next(_calls)}"
        for number, rank in enumerate(ranks):
            rank.line.send((work, number, world, store, given))
        found, errors = _results(ranks, limit_s)
        if errors:
            raise AssertionError("\n".join(errors))
        late = [rank for rank in wanted if rank not in found]
        assert not late, f"ranks {late} did not end in {limit_s:g} s"
        return [found[rank] for rank in wanted]
    finally:
        if only is not None or len(found) < world:
            for rank in ranks:
                rank.end()
                if rank in _kept:
                    _kept.remove(rank)


def _results(ranks: list[_Rank], limit_s: float) -> tuple[dict[int, Any], list[str]]:
    """Return the results of ranks that are done in time, and the traces of those that failed."""
    found: dict[int, Any] = {}
    errors: list[str] = []
    waiting = {rank.line: number for number, rank in enumerate(ranks)}
    until = time.monotonic() + limit_s
    while waiting and time.monotonic() < until:
        for line in wait(list(waiting), until - time.monotonic()):
            assert isinstance(line, Connection)
            number = waiting.pop(line)
            try:
                done, said = line.recv()
            except EOFError:  # it has died
                continue
            if done:
                found[number] = torch.load(io.BytesIO(said), weights_only=True)
            else:
                errors.append(f"rank {number}:\n{said}")
                until = min(until, time.monotonic() + _GRACE_S)
    return found, errors


def _serve(line: Connection) -> None:
    """Carry out what is asked for until nobody asks."""
    torch.set_num_threads(1)
    while True:
        try:
            work, rank, world, store, given = line.recv()
        except EOFError:
            os._exit(0)
        torch.manual_seed(0)
        try:
            dist.init_process_group(
                "gloo",
                init_method=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            result = work(rank, world, *given)
        except BaseException:
            line.send((False, traceback.format_exc()))
            os._exit(1)
        told = io.BytesIO()
        torch.save(result, told)
        line.send((True, told.getvalue()))
        del work, given, result
        gc.collect()  # what holds the group is let go before it
        dist.destroy_process_group()
