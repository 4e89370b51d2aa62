"""Support for `DistributedDataParallel` (DDP): find and check the wrappers, size the buckets.

The session issues no collectives, so it cannot deadlock ranks that take different paths.

[Note: reduced gradients]  The local gradient is complete once autograd has accumulated it; the
reduced one only when backward ends. DDP copies the gradient into a bucket right after the session's
own hook, reduces the bucket, and writes the result over the gradient, which is then in a region. So
gradients are paged immediately, but no update uses one before ``step()``. A parameter unused on
this rank may still get a reduced gradient in new memory, which is adopted as backward ends.

[Note: buckets]  Buckets total the size of all reduced gradients. They are the reducer's memory,
outside all regions; their bytes are subtracted from the budget before it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that DDP wraps, or ``model`` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def replicas_of(model: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """Return all `DistributedDataParallel` instances in the module tree of ``model``."""
    return tuple(one for one in model.modules() if isinstance(one, DistributedDataParallel))


def check_replicas(
    replicas: tuple[DistributedDataParallel, ...],
    optimizer: object,
    *,
    accelerator: bool,
) -> None:
    """Reject DDP configurations that are unsupported or untested.

    Raises:
        ConfigError: the device, the optimizer or an option of the reducer is not supported.
    """
    for one in replicas:
        name = type(one.module).__name__
        if accelerator or one.device_type not in ("cpu", "meta"):
            raise ConfigError(
                f"this {name} is replicated by DistributedDataParallel and is to be trained on an "
                "accelerator, where nobody is told before the reducer writes a gradient that is "
                "not there: train it on the CPU, or in one process without DistributedDataParallel"
            )
        if isinstance(optimizer, HostOptimizer):
            raise ConfigError(
                f"HostOptimizer takes gradients before DistributedDataParallel has reduced those "
                f"of this {name}: use an optimizer of torch.optim, or one process"
            )
        if any(parameter.is_meta for parameter in one.module.parameters()):
            raise ConfigError(
                f"this {name} was wrapped in DistributedDataParallel on the meta device, so its "
                "buckets have no memory: give it its weights first, by "
                "dynoffload.materialize(model), the same on all ranks, then wrap it"
            )
        if one.mixed_precision is not None:
            raise ConfigError(
                "DistributedDataParallel(mixed_precision=...) gives parameters other memory in "
                f"every forward of this {name}, which cannot be paged: use torch.autocast"
            )


def has_part_of_experts(model: nn.Module) -> bool:
    """Return whether ``model`` has layers whose experts are distributed over ranks."""
    return any(getattr(module, "has_part_of_experts", False) for module in model.modules())


class Rows(NamedTuple):
    """A parameter that is a contiguous block of rows of a larger one, distributed over ranks.

    Attributes:
        parameter: the layer's, (rows, ...).
        begin: the first row on this rank.
        total: number of rows on all ranks.
    """

    parameter: nn.Parameter
    begin: int
    total: int


def rows_of_experts(model: nn.Module) -> Iterator[Rows]:
    """Yield the parameters of ``model`` that hold this rank's rows of a larger one."""
    for module in model.modules():
        if getattr(module, "has_part_of_experts", False):
            yield from module.rows_of_experts()  # type: ignore[operator]


def bucket_bytes(replicas: tuple[DistributedDataParallel, ...]) -> int:
    """Return the bytes of the buckets: those of all dense gradients that are reduced."""
    found: dict[int, int] = {}
    for one in replicas:
        sparse = _sparse(one.module)
        reduced = [*one._module_parameters, *one._delay_all_reduce_params]
        for parameter in reduced:
            if parameter.requires_grad and id(parameter) not in sparse:
                found[id(parameter)] = parameter.numel() * parameter.element_size()
    return sum(found.values())


def _sparse(model: nn.Module) -> set[int]:
    """Return the ids of parameters with sparse gradients, which have no bucket."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(one.weight) for one in model.modules() if isinstance(one, tables) and one.sparse}


def beside(
    replicas: tuple[DistributedDataParallel, ...], device: Device | None, nbytes: int
) -> int:
    """Return how many of the ``nbytes`` of buckets are not already counted as gradients.

    Under ``gradient_as_bucket_view``, gradients outside ``device`` are views of the buckets and are
    counted as gradients.
    """
    inside: dict[int, int] = {}
    for one in replicas:
        if one.gradient_as_bucket_view:
            for parameter in one._module_parameters:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if device is None or device.owner(gradient) < 0:
                    storage = gradient.untyped_storage()
                    inside[storage._cdata] = storage.nbytes()
    return max(0, nbytes - sum(inside.values()))


def is_known(model: nn.Module, replicas: tuple[DistributedDataParallel, ...]) -> bool:
    """Return False if the active DDP forward is not one of ``replicas`` but reduces gradients of
    ``model``; otherwise True."""
    active = DistributedDataParallel._active_ddp_module
    if active is None or any(active is one for one in replicas):
        return True
    reduced = {id(one) for one in active._module_parameters if one.requires_grad}
    return not any(id(parameter) in reduced for parameter in model.parameters())


def unknown(model: nn.Module) -> ConfigError:
    """Return the error for a model called by a DDP wrapper that was not passed to offload()."""
    return ConfigError(
        f"this {type(model).__name__} is called by a DistributedDataParallel that offload() was "
        "not given, so the budget is divided without its buckets: wrap the model before the block, "
        "and pass the DistributedDataParallel to offload()"
    )


def as_backward_ends(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the current backward, after the callbacks already queued, such as
    the reducer's finalization."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))
