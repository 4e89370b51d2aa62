"""One row of `dynoffload.experiments.gpu`: a task, trained in this process.

`measure` caps the accelerator's allocator and trains a task of `gpu_ways`. It has never run on a
GPU so far.

[Note: time]  A step is timed from its call until the queue on which torch computes has come to its
end, for all ways alike. Copies that go on beside that, for the next step, are not waited for.

[Note: charged]  Host memory that is charged is by how much the process's resident set grew from
before the block until after the steps. A step of a tiny network comes first, so that the kernels
and libraries that the accelerator's software loads are not counted.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from dynoffload.errors import BudgetError, ClientError, DynOffloadError
from dynoffload.experiments.gpu_check_cases import deterministic
from dynoffload.experiments.gpu_ways import PLAIN, WAYS, Ready, Task
from dynoffload.experiments.processes import NEVER_LEFT
from dynoffload.experiments.trainer import finite
from dynoffload.experiments.zoo.building import moved
from dynoffload.memory.limits import resident_bytes

MEASURED, NO_ROOM, NOT_MEASURED = "measured", "does not fit", "not measured"
_SAID = 400


def measure(task: Task) -> dict[str, Any]:
    """Train a task and return what was found; its block is not left.

    Returns:
        ``state`` (one of `MEASURED`, `NO_ROOM`, `NOT_MEASURED`), ``why`` it is not measured, and
        the numbers if it is: ``steps_s``, ``seconds`` (their median), ``losses`` of all steps as
        `float.hex` writes them, ``parameters``, ``peak_allocated`` and ``peak_reserved`` bytes of
        the allocator (0 where it does not count), and of this library's sessions ``bytes_in``,
        ``bytes_out``, ``stall_s`` (medians), ``peak_fast_bytes``, ``first_allocated`` (of the first
        step; ``peak_allocated`` is of the others), ``pinned_bytes``, ``charged_bytes`` and
        ``backend``.
    """
    try:
        return _measure(task)
    except (torch.OutOfMemoryError, BudgetError, MemoryError) as error:
        return {"state": NO_ROOM, "why": _said(error)}
    except (ClientError, DynOffloadError, RuntimeError, NotImplementedError) as error:
        return {"state": NOT_MEASURED, "why": _said(error)}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:_SAID]}"


def _measure(task: Task) -> dict[str, Any]:
    from dynoffload.experiments import zoo

    device = place_of(task)
    NEVER_LEFT.enter_context(deterministic() if task.deterministic else nullcontext())
    _warm_up(task, device)
    cap(device, task.cap_bytes)
    before = resident_bytes()
    ready = NEVER_LEFT.enter_context(WAYS[task.way].prepare(task, device))
    torch.manual_seed(0)
    stream = zoo.samples(task.network, "train", **task.shape)
    seconds, losses = [], []
    for _ in range(task.warmup + task.steps):
        args = moved(next(stream).args, device)
        wait(device)
        start = time.perf_counter()
        loss = ready.step(args)
        wait(device)
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss).hex())
    counted = seconds[task.warmup :]
    return {
        "state": MEASURED,
        "why": "",
        "seconds": median(counted),
        "steps_s": counted,
        "losses": losses,
        "parameters": sum(p.numel() for p in ready.model.parameters()),
        **_peaks(device),
        **_of_session(ready, task, before),
    }


def place_of(task: Task) -> torch.device:
    """Return where the tensors of a task's accelerator are."""
    return torch.device(task.device)


def wait(device: torch.device) -> None:
    """Wait for the queue on which torch computes; see [Note: time]."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def cap(device: torch.device, nbytes: int) -> None:
    """Let the accelerator's allocator take no more than ``nbytes``; 0 for no cap.

    What it has cached by then is handed back, and its peaks count from now on.
    """
    if device.type == "cpu":
        return
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    if nbytes:
        module = torch.get_device_module(device)
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def _peaks(device: torch.device) -> dict[str, int]:
    if device.type == "cpu":
        return {"peak_allocated": 0, "peak_reserved": 0}
    return {
        "peak_allocated": int(torch.accelerator.max_memory_allocated(device)),
        "peak_reserved": int(torch.accelerator.max_memory_reserved(device)),
    }


def _warm_up(task: Task, device: torch.device) -> None:
    """Load what the first kernels load, by a step of a tiny network; see [Note: charged]."""
    from dataclasses import replace

    from dynoffload.experiments import zoo

    tiny = replace(task, way=PLAIN, preset="tiny", sizes={}, shape={})
    with WAYS[PLAIN].prepare(tiny, device) as ready:
        ready.step(moved(next(zoo.samples(task.network)).args, device))
    wait(device)


def _of_session(ready: Ready, task: Task, before: int) -> dict[str, Any]:
    session = ready.session
    if session is None:
        return {}
    steps = session.log.steps[task.warmup :]
    found: dict[str, Any] = {
        key: finite(float(median(getattr(step, key) for step in steps)))
        for key in ("bytes_in", "bytes_out", "stall_s")
    }
    every = session.log.steps
    found["peak_fast_bytes"] = max(step.peak_fast_bytes for step in every)
    allocated = [step.peak_allocated_bytes for step in every]  # a session begins each step anew
    if any(allocated):
        found |= {"first_allocated": allocated[0], "peak_allocated": max(allocated[1:])}
    found["backend"] = session.backend
    paging = getattr(session, "_paging", None)
    if paging is not None:
        found["pinned_bytes"] = paging.device.taken_bytes()
        found["charged_bytes"] = resident_bytes() - before
    return found
