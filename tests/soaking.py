"""A long run of a dynamic network, and what the process takes along the way; not a test."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from exactness import SMALL_PAGES, footprint_of, least_budget, small, small_loss, small_samples
from fused_networks import paging_of
from torch import Tensor, nn

import dynoffload
from dynoffload.experiments import zoo
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime import recording
from dynoffload.telemetry import RunLog

SAMPLES = 40
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: 0)  # of glibc alone


class Taken(NamedTuple):
    """What the process takes after so many steps."""

    steps: int
    resident: int
    descriptors: int
    threads: int
    spill: int
    spill_blocks: int
    objects: int
    records: int  # single ones, that the log keeps


def network(
    name: str, layers: int
) -> tuple[nn.Module, list[Any], Callable[[nn.Module, Any], Tensor]]:
    """Return a network, samples of different shapes, and its loss."""
    if name == "small":
        return small(layers=layers), small_samples(SAMPLES), small_loss
    shape = {"min_nodes": 8, "max_nodes": 32}
    samples = list(islice(zoo.samples("tree", seed=0, **shape), SAMPLES))
    return zoo.build("tree", "tiny-untied"), samples, lambda model, s: model(*s.args).loss


def soak(
    name: str, backend: str, steps: int, *, layers: int = 2, records: int = 1, **options: Any
) -> None:
    """Train for ``steps`` steps under a third of the footprint, or the least that will do, and
    print a JSON row for each tenth of the run; the log keeps so many single ``records``."""
    torch.set_num_threads(1)
    recording.MOST_RECORDS = records
    model, samples, loss_of = network(name, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False, **options}
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
    with dynoffload.offload(model, optimizer, budget=budget, config=config) as session:
        for step in range(1, steps + 1):
            loss_of(model, samples[step % SAMPLES]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if step % (steps // 10) == 0:
                found = os.fstat(paging_of(session).device._spill.fd)  # type: ignore[attr-defined]
                gc.collect()
                _trim(0)
                row = Taken(
                    step,
                    resident_bytes(),
                    len(os.listdir("/proc/self/fd")),
                    len(os.listdir("/proc/self/task")),
                    found.st_size,
                    found.st_blocks,
                    len(gc.get_objects()),
                    records_of(session.log),
                )
                sys.stdout.write(json.dumps(row) + "\n")


def records_of(log: RunLog) -> int:
    """Return how many single records ``log`` keeps."""
    return sum(map(len, (log.transfers, log.stalls, log.phases, log.memory, log.blocks)))
