"""Checks of a `HostOptimizer`'s options and parameters."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer.states import ParameterState
from dynoffload.memory.pieces import is_dense

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_TILE = 4096


def check_options(
    tile_bytes: int,
    threads: int | None,
    delayed: bool,
    warmup_steps: int,
    spill_dir: str | Path | None,
    host_budget: int | str | None,
) -> None:
    """Check `HostOptimizer`'s options, also against each other.

    Raises:
        ConfigError: naming what is wrong.
    """
    if tile_bytes < _LEAST_TILE:
        raise ConfigError(f"tile_bytes={tile_bytes} is too small: pass '4KiB' or more, as '8MiB'")
    if threads is not None and (isinstance(threads, bool) or threads < 1):
        raise ConfigError(
            f"threads={threads!r} cannot update parameters: pass 1 or more, or None for one for "
            "each core that this process may use"
        )
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError(f"warmup_steps={warmup_steps!r} is no number of steps: pass 0 or more")
    if warmup_steps and not delayed:
        raise ConfigError("warmup_steps are those before updates are delayed: pass delayed=True")
    if host_budget is not None and spill_dir is None:
        raise ConfigError("host_budget= needs spill_dir=, where what is beyond it goes")


def check_parameters(
    states: Iterable[ParameterState], device: torch.device, *, coming: bool = False
) -> None:
    """Check that each parameter can have a master copy.

    Args:
        states: of the parameters.
        device: that all must be on.
        coming: whether they may still be on the CPU.

    Raises:
        ConfigError: naming the first that cannot.
    """
    for state in states:
        parameter, why = state.parameter, ""
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
            raise ConfigError(f"{state.name} {why}")


def check_not_reduced(parameters: Container[torch.Tensor]) -> None:
    """Refuse parameters in a `DistributedDataParallel`: it would reduce gradients after they left.

    A parameter does not reference its wrapper, so all objects of the process are searched.

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
