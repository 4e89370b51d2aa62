"""Models whose parameters are spread over processes by FSDP2's ``fully_shard``.

Paging sees of each parameter the part that lies in this process (`dynoffload.memory.local`).

[Note: shards]  A shard is a region as any parameter. FSDP reads it when it copies it into the
buffer of an all-gather, before the forward of a module of its group, and once more in backward; it
makes its gradient out of a reduce-scatter. What it gathers, whole parameters and those buffers, is
FSDP's own memory, beside the budget: it comes and goes with each module.

[Note: aliases]  FSDP keeps a flat view of each shard, padded to the size of the largest rank's,
and that is what it reads. The view, and what it is a view of, follow the shard wherever it goes.

[Note: groups]  All of a group is read at once, before anything in the group's module runs. So the
group is the unit, and its hook comes before FSDP's.

[Note: unsharded]  While a group is gathered, its modules have the whole parameters in place of the
shards. Whoever reads the model as a whole calls `reshard` first.
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
_BESIDE = 7  # times the bytes of a group; see `beside_bytes`


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the path, module and state of what ``fully_shard`` was called with, each state once."""
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
    """Parameters that are gathered together.

    Attributes:
        path: of the module before whose forward that is.
        module: the module.
        parameters: the shards.
        own: FSDP's objects for them, in the same order.
    """

    path: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    own: tuple[Any, ...]

    def whole_bytes(self) -> int:
        """Return the bytes of the whole parameters, as they are gathered."""
        return sum(
            one._orig_size.numel() * (one.mp_policy.param_dtype or one.sharded_param.dtype).itemsize
            for one in self.own
        )


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of ``model``, in the order of its modules; none if it is not sharded."""
    found = []
    for path, module, state in _states(model):
        own = tuple(one for group in state._fsdp_param_groups for one in group.fsdp_params)
        if own:
            found.append(Group(path, module, tuple(one.sharded_param for one in own), own))
    return found


def aliases_of(model: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
    """Return what FSDP holds of the memory of each shard, beside the shard; see [Note: aliases]."""
    found: dict[nn.Parameter, list[torch.Tensor]] = {}
    for group in groups_of(model):
        for parameter, own in zip(group.parameters, group.own, strict=True):
            flat = own._sharded_param_data
            memory = local(parameter).untyped_storage()._cdata
            held = [flat] if flat._base is None else [flat, flat._base]
            found[parameter] = [one for one in held if one.untyped_storage()._cdata == memory]
    return found


def reshard(model: nn.Module) -> None:
    """Have all modules of ``model`` show their shards; see [Note: unsharded]."""
    for _, module, _ in _states(model):
        module.reshard()  # type: ignore[operator]


def drop_gradients(model: nn.Module) -> None:
    """Forget the gradients that FSDP keeps of whole parameters, where none were reduced yet."""
    for group in groups_of(model):
        for one in group.own:
            one.unsharded_accumulated_grad = None
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def beside_bytes(groups: Sequence[Group]) -> int:
    """Return the bytes of FSDP's own memory while a model of ``groups`` trains, about.

    It is most in backward, of the largest group: its whole parameters, the buffer in which the next
    group comes, gradients, what they are reduced in (two of a time), what the process group copies
    that to, and its share of the result. A root stays gathered beside them.
    """
    roots = sum(group.whole_bytes() for group in groups if not group.path)
    return roots + _BESIDE * max((group.whole_bytes() for group in groups), default=0)


def said_of(groups: Sequence[Group]) -> str:
    """Return what the plan line says of shards."""
    if not groups:
        return ""
    count = sum(len(group.parameters) for group in groups)
    return (
        f", {count} shards in {len(groups)} groups of fully_shard, which gathers about "
        f"{format_bytes(beside_bytes(groups))} beside the budget"
    )


def check(model: nn.Module, *, accelerator: bool) -> None:
    """Refuse what cannot be served of tensors that are spread over processes.

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
    """Whose shard a whole parameter was gathered from; autograd saves those, not the shards.

    Args:
        groups: of the model.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sources: dict[int, nn.Parameter] = {}

    def source_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the shard of which ``tensor``, or what it is a view of, is the whole."""
        whole = tensor if tensor._base is None else tensor._base
        if not (whole.is_leaf and whole.requires_grad) and not isinstance(whole, nn.Parameter):
            return None
        key = tensor.untyped_storage()._cdata
        if key not in self._sources:  # FSDP makes each at its first use, and keeps it
            self._sources = {
                output.untyped_storage()._cdata: one.sharded_param
                for group in self._groups
                for one in group.own
                for output in one.all_gather_outputs
            }
        return self._sources.get(key)


def spread_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return ``value``, a part made for this process's part of ``parameter``, spread as that is;
    what is no such part stays what it is."""
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
    """Return ``value``, which all processes have alike, as what operators take beside
    ``parameter``: spread over the same processes, or as it is beside None."""
    if parameter is None:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter._spec.mesh  # type: ignore[attr-defined]
    made: torch.Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made
