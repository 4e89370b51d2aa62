"""Measurements of one process of `dynoffload.experiments.gpu`: a training, or the link.

`measure` caps the accelerator's allocator and trains. A step's time ends, for all methods, when the
stream on which torch computes is idle; copies for the next step may still run. Charged host memory
is the growth of the process's resident set since before the network is built. A step of a tiny
network comes first, so that loading the accelerator's libraries is not counted.

[Note: kernels]  Deterministic kernels can be several times slower: attention's backward is. So only
the steps before the measured ones use them, and their losses are compared.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from dynoffload.errors import BudgetError, DynOffloadError
from dynoffload.experiments.gpu_check_training import deterministic, kernel_named_by
from dynoffload.experiments.processes import NEVER_LEFT
from dynoffload.experiments.trainer import Trainer, finite
from dynoffload.experiments.ways import Spec, place_of
from dynoffload.memory.accelerator import torch_streams
from dynoffload.memory.accelerator.streams import StreamEvent
from dynoffload.memory.limits import resident_bytes
from dynoffload.units import GiB, MiB

MEASURED, NO_ROOM, NOT_MEASURED = "measured", "does not fit", "not measured"
_MESSAGE_CHARS = 160
_AHEAD = 4  # copies enqueued before the first is waited for


def measure(spec: Spec, cap_bytes: int, steps: int, warmup: int) -> dict[str, Any]:
    """Train and return the results; the block is never left.

    Args:
        spec: what is trained.
        cap_bytes: limit of the accelerator's allocator; 0 for no limit.
        steps: measured steps.
        warmup: steps before them.

    Returns:
        ``state`` (one of `MEASURED`, `NO_ROOM`, `NOT_MEASURED`) and ``why`` it is not measured. If
        it is: ``steps_s``, ``seconds`` (their median), ``losses`` of the steps before in
        `float.hex` format, ``parameters``, ``not_deterministic`` (the kernel that has no
        deterministic algorithm, or ""), ``peak_allocated`` (for sessions after the first step) and
        ``peak_reserved`` bytes of the allocator (0 where it does not count). For this library's
        sessions also ``bytes_in``, ``bytes_out``, ``stall_s`` (medians), ``peak_fast_bytes``,
        ``pinned_bytes`` and ``charged_bytes`` of the host, and ``backend``.
    """
    try:
        found = _trained(spec, cap_bytes, steps, warmup)
        return {"state": MEASURED, "why": "", **found}
    except (torch.OutOfMemoryError, BudgetError, MemoryError) as error:
        return {"state": NO_ROOM, "why": _message(error)}
    except (DynOffloadError, RuntimeError, NotImplementedError) as error:
        return {"state": NOT_MEASURED, "why": _message(error)}


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:_MESSAGE_CHARS]}"


def _trained(spec: Spec, cap_bytes: int, steps: int, warmup: int) -> dict[str, Any]:
    device = place_of(spec)
    NEVER_LEFT.enter_context(deterministic())
    kernel = ""
    try:
        _step_of_tiny(spec)
    except RuntimeError as error:
        kernel = kernel_named_by(error)
        if not kernel:
            raise
        torch.set_deterministic_debug_mode("warn")
        _step_of_tiny(spec)
    _cap(device, cap_bytes)
    before = resident_bytes()
    trainer = Trainer(spec)
    NEVER_LEFT.enter_context(trainer.training())
    first = [trainer.step() for _ in range(warmup)]
    torch.set_deterministic_debug_mode("default")
    seconds = [trainer.step()["seconds"] for _ in range(steps)]
    found: dict[str, Any] = {
        "seconds": median(seconds),
        "steps_s": seconds,
        "losses": [one["loss"] for one in first],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "peak_allocated": 0,
        "peak_reserved": 0,
        "not_deterministic": kernel,
    }
    if device.type != "cpu":
        found["peak_allocated"] = int(torch.accelerator.max_memory_allocated(device))
        found["peak_reserved"] = int(torch.accelerator.max_memory_reserved(device))
    if trainer.session is not None:
        every = trainer.session.log.steps
        for key in ("bytes_in", "bytes_out", "stall_s"):
            found[key] = finite(float(median(getattr(one, key) for one in every[warmup:])))
        found["peak_fast_bytes"] = max(one.peak_fast_bytes for one in every)
        # A session resets the allocator's peak in each step.
        peaks = (one.peak_allocated_bytes for one in every[1:])
        found["peak_allocated"] = max(found["peak_allocated"], *peaks)
        found["backend"] = trainer.session.backend
        if trainer.session.paging:
            found["pinned_bytes"] = trainer.session._paging.device.taken_bytes()
            found["charged_bytes"] = resident_bytes() - before
    return found


def _step_of_tiny(spec: Spec) -> None:
    trainer = Trainer(Spec(spec.network, "tiny", device=spec.device))
    with trainer.training():
        trainer.step()


def _cap(device: torch.device, nbytes: int) -> None:
    """Limit the accelerator's allocator to ``nbytes`` (0: no limit), and reset its peak
    counters."""
    if device.type == "cpu":
        return
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    if nbytes:
        module = torch.get_device_module(device)
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def measure_link(
    device: str, seconds: float = 1.0, chunk: int = 32 * MiB, memory_bytes: int = GiB
) -> dict[str, Any]:
    """Measure copies between an accelerator and host memory, through a session's streams.

    Args:
        device: the accelerator.
        seconds: minimum duration of each measurement.
        chunk: bytes of a copy.
        memory_bytes: size of the host memory copied from and to.

    Returns:
        ``in_bps`` and ``out_bps`` of one direction alone, ``both_in_bps`` and ``both_out_bps`` of
        both at once, and whether the host memory is ``pinned``.
    """
    streams = torch_streams.open_streams(torch.device(device))
    memory = streams.host(memory_bytes)
    chunks = torch.split(memory, chunk)
    storages = [torch.UntypedStorage(0, device=streams.device) for _ in range(2)]  # type: ignore[no-untyped-call]
    for storage in storages:
        streams.fill(storage, chunk)
    given, events = streams.now(), list[StreamEvent]()

    def rate(*, into: bool, out: bool) -> float:
        """Return the bytes per second of each requested direction."""
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds or not count:
            # Different chunks, so that concurrent copies share none.
            mine, other = chunks[2 * count % len(chunks)], chunks[(2 * count + 1) % len(chunks)]
            if into:
                events.append(streams.copy_in(storages[0], mine, [given]))
            if out:
                events.append(streams.copy_out(other, storages[1], [given]))
            count += 1
            while len(events) > _AHEAD:
                events.pop(0).wait()
        while events:
            last = events.pop(0)
            last.wait()
            streams.after(last)
        return count * chunk / (time.perf_counter() - start)

    both = rate(into=True, out=True)
    found = {
        "in_bps": rate(into=True, out=False),
        "out_bps": rate(into=False, out=True),
        "both_in_bps": both,
        "both_out_bps": both,
        "pinned": streams.pinned,
    }
    for storage in storages:
        streams.empty(storage)
    streams.release(memory, held=False)
    return found
