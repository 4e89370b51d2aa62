"""What an optimizer on the host is made with: options and parameters that fit together."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.queues import Queues
from dynoffload.memory.accelerator.streams import open_queues
from dynoffload.memory.cores import address_of
from dynoffload.memory.pieces import is_dense
from dynoffload.optim.immediate import Immediate
from dynoffload.optim.shelves import Entry

_PLACES = ("auto", "host", "device")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_TILE = 4096


def check_options(
    place: str,
    tile_bytes: int,
    delayed: bool,
    warmup_steps: int,
    spill_dir: str | Path | None,
    host_budget: int | str | None,
) -> None:
    """Refuse options that make no sense together; they are `HostOptimizer`'s.

    Raises:
        ConfigError: naming what is wrong.
    """
    if place not in _PLACES:
        raise ConfigError(f"place={place!r} is unknown; there are {', '.join(map(repr, _PLACES))}")
    if tile_bytes < _LEAST_TILE:
        raise ConfigError(f"tile_bytes={tile_bytes} is no tile: pass '4KiB' or more, as '8MiB'")
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError(f"warmup_steps={warmup_steps!r} is no number of steps: pass 0 or more")
    if delayed:
        check_delay(place)
    if warmup_steps and not delayed:
        raise ConfigError("warmup_steps are those before updates are delayed: pass delayed=True")
    if host_budget is not None and spill_dir is None:
        raise ConfigError("host_budget= needs spill_dir=, where what is beyond it goes")


def check_delay(place: str) -> None:
    """Refuse to delay updates that are not made on the host.

    Raises:
        ConfigError: they are made elsewhere.
    """
    if place == "device":
        raise ConfigError(
            "delayed=True makes updates on the host beside the next step, and place is 'device': "
            'pass place="host"'
        )


def check_entries(entries: Iterable[Entry], device: torch.device, *, coming: bool = False) -> None:
    """Refuse parameters that have no master.

    Args:
        entries: of the parameters.
        device: that all must be on.
        coming: they may still be on the CPU.

    Raises:
        ConfigError: naming the first.
    """
    for entry in entries:
        parameter, why = entry.parameter, ""
        if parameter.is_meta:
            why = "is on the meta device: give it its values first, as by materialize()"
        elif parameter.device != device and not (coming and parameter.device.type == "cpu"):
            why = (
                f"is on {parameter.device}, and the others on {device}: move the model to one "
                "device before the optimizer is made, and make one optimizer for each device"
            )
        elif parameter.dtype not in _DTYPES:
            why = f"is {parameter.dtype}: bfloat16, float16 and float32 have masters in float32"
        elif parameter.layout is not torch.strided or not is_dense(parameter):
            why = "has elements apart, or together, in memory: make it contiguous()"
        if why:
            raise ConfigError(f"{entry.name} {why}")


def check_not_reduced(parameters: Container[torch.Tensor]) -> None:
    """Refuse parameters whose gradients `DistributedDataParallel` is to reduce: they leave before.

    Nothing of a parameter names its wrapper, so all objects of the process are looked through.

    Raises:
        ConfigError: naming the wrapped module.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    for one in gc.get_objects():
        if not issubclass(type(one), DistributedDataParallel):
            continue
        ignored: set[str] = one.parameters_to_ignore
        reduced = (p for name, p in one.module.named_parameters() if name not in ignored)
        if dist.get_world_size(one.process_group) > 1 and any(p in parameters for p in reduced):
            raise ConfigError(
                f"HostOptimizer takes gradients before DistributedDataParallel has reduced those "
                f"of this {type(one.module).__name__}, so ranks would diverge: use an optimizer of "
                "torch.optim, or one process"
            )


def queues_of(parameters: Iterable[nn.Parameter], device: torch.device | str | None) -> Queues:
    """Return the queues of ``device``, or of the device that the first parameter is on.

    Raises:
        BackendError: there is no such accelerator.
    """
    if device is None:
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device={device!r} is no device: pass 'cpu', or what "
            "torch.accelerator.current_accelerator() names, such as 'cuda'"
        ) from error
    return Immediate() if device.type == "cpu" else open_queues(device)


def peers_of(device: torch.device) -> list[str | None]:
    """Return the PCI addresses of the accelerators of this machine, by number, where torch has
    them."""
    if device.type == "cpu":
        return []
    count = torch.accelerator.device_count()
    return [address_of(torch.device(device.type, number)) for number in range(count)]
