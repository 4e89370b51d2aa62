"""Models whose parameters are sharded over processes by FSDP2's ``fully_shard``.

Paging sees the local shard of each parameter (`dynoffload.memory.local`).

[Note: shards]  A shard is a region like any parameter. FSDP copies it into an all-gather buffer
before the forward of a module of its group, and again in backward. Its gradient comes from a
reduce-scatter. Gathered parameters and communication buffers are FSDP's own memory, outside the
budget, allocated and freed with each module.

[Note: aliases]  FSDP reads each shard through a flat view, padded to the size of the largest rank's
shard. The view and its base follow the shard's storage whenever it moves.

[Note: groups]  FSDP reads all shards of a group at once, before anything in the group's module
runs. So the group is the unit, and its hook runs before FSDP's.

[Note: unsharded]  While a group is gathered, its modules hold the whole parameters in place of the
shards. Code that reads the whole model calls `reshard` first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.memory.local import is_spread, local
from dynoffload.units import format_bytes

_MODULE = "torch.distributed.fsdp"
_GROUP_FACTOR = 7  # multiple of the bytes of the largest group; see `beside_bytes`


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield path, module and FSDP state of each ``fully_shard`` call, each state once."""
    kind = getattr(sys.modules.get(_MODULE), "FSDPModule", None)
    if kind is None:
        return
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield path, module, state


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that FSDP gathers together.

    Attributes:
        path: of the module before whose forward they are gathered.
        module: the module at ``path``.
        parameters: the shards.
        own: FSDP's objects for them, in the same order.
    """

    path: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    own: tuple[Any, ...]

    def whole_bytes(self) -> int:
        """Return the bytes of the gathered parameters, in the dtype of the all-gather."""
        return sum(
            one._orig_size.numel() * (one.mp_policy.param_dtype or one.sharded_param.dtype).itemsize
            for one in self.own
        )


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of ``model`` in module order; none if it is not sharded."""
    found = []
    for path, module, state in _states(model):
        own = tuple(one for group in state._fsdp_param_groups for one in group.fsdp_params)
        if own:
            found.append(Group(path, module, tuple(one.sharded_param for one in own), own))
    return found


def aliases_of(model: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
    """Return FSDP's other tensors on the storage of each shard; see [Note: aliases]."""
    found: dict[nn.Parameter, list[torch.Tensor]] = {}
    for group in groups_of(model):
        for parameter, own in zip(group.parameters, group.own, strict=True):
            flat = own._sharded_param_data
            memory = local(parameter).untyped_storage()._cdata
            held = [flat] if flat._base is None else [flat, flat._base]
            found[parameter] = [one for one in held if one.untyped_storage()._cdata == memory]
    return found


def reshard(model: nn.Module) -> None:
    """Make all modules of ``model`` hold their shards; see [Note: unsharded]."""
    for _, module, _ in _states(model):
        module.reshard()  # type: ignore[operator]


def drop_gradients(model: nn.Module) -> None:
    """Discard the unreduced gradients that FSDP keeps for whole parameters."""
    for group in groups_of(model):
        for one in group.own:
            one.unsharded_accumulated_grad = None
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def beside_bytes(groups: Sequence[Group]) -> int:
    """Estimate the bytes of FSDP's own memory while a model of ``groups`` trains.

    The peak is in backward, for the largest group: its whole parameters, the next group's
    all-gather buffer, gradients, two reduce-scatter inputs, the process group's copy of one, and
    the output shard. The root group stays gathered in addition.
    """
    roots = sum(group.whole_bytes() for group in groups if not group.path)
    return roots + _GROUP_FACTOR * max((group.whole_bytes() for group in groups), default=0)


def said_of(groups: Sequence[Group]) -> str:
    """Return the part of the plan's log line about shards."""
    if not groups:
        return ""
    count = sum(len(group.parameters) for group in groups)
    return (
        f", {count} shards in {len(groups)} groups of fully_shard, which gathers about "
        f"{format_bytes(beside_bytes(groups))} beside the budget"
    )


def check(model: nn.Module, *, accelerator: bool) -> None:
    """Reject distributed tensors that paging does not support.

    Raises:
        ConfigError: naming the parameter, or the option, and the remedy.
    """
    own = {id(one.sharded_param): one for group in groups_of(model) for one in group.own}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_spread(tensor):
            continue
        why = _refused(own.get(id(tensor)))
        if why:
            raise ConfigError(f"{name!r} of this {type(model).__name__} {why}")
    if not own:
        return
    if accelerator:
        raise ConfigError(
            f"this {type(model).__name__} is sharded by fully_shard: its shards are paged on the "
            "CPU, and not on an accelerator; pass a mesh of the CPU, or train without offload()"
        )


def _refused(own: Any) -> str:
    if own is None or own.is_dtensor:
        return (
            "is spread over processes, and not by fully_shard alone: only its shards are paged; "
            "train without offload(), or without tensor parallelism"
        )
    if own.offload_to_cpu:
        return (
            "is under FSDP's own CPUOffloadPolicy: leave offload_policy out of fully_shard, as "
            "its shards are paged here"
        )
    if hasattr(own._sharded_local_tensor, "fsdp_pre_all_gather"):
        return (
            "is of a tensor class that takes part in FSDP's gathering "
            f"({type(own._sharded_local_tensor).__name__}): only plain tensors are paged"
        )
    if own._sharded_local_tensor.is_meta:
        return (
            "is sharded on the meta device: give the shards memory, by "
            "model.to_empty(device='cpu'), and values, before the offload() block"
        )
    return ""


class Gathered:
    """Maps gathered whole parameters to their shards, since autograd saves the whole ones.

    Args:
        groups: of the model.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sources: dict[int, nn.Parameter] = {}

    def source_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the shard of the whole parameter that is ``tensor`` or its base, or None."""
        whole = tensor if tensor._base is None else tensor._base
        if not (whole.is_leaf and whole.requires_grad) and not isinstance(whole, nn.Parameter):
            return None
        key = tensor.untyped_storage()._cdata
        if key not in self._sources:  # FSDP creates each output at its first use, and keeps it
            self._sources = {
                output.untyped_storage()._cdata: one.sharded_param
                for group in self._groups
                for one in group.own
                for output in one.all_gather_outputs
            }
        return self._sources.get(key)


def spread_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return ``value`` as a DTensor placed like ``parameter`` if it has the shape of its local
    shard; return any other value unchanged."""
    part = local(parameter)
    if part is parameter or not isinstance(value, torch.Tensor) or is_spread(value):
        return value
    if not value.dim() or value.shape != part.shape:
        return value
    spec = parameter._spec  # type: ignore[attr-defined]
    if value.dtype != part.dtype:
        meta = spec.tensor_meta._replace(dtype=value.dtype)
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    kind: Any = type(parameter)
    return kind(value, spec, requires_grad=False)


def replica_beside(parameter: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, equal on all processes, in the form that operators accept together with
    ``parameter``: replicated on its mesh, or unchanged if it is None."""
    if parameter is None:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter._spec.mesh  # type: ignore[attr-defined]
    made: torch.Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made
