"""Counts the bytes of a model's tensors and of future optimizer state; it reads no content."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dynoffload.distributed.sharded import aliases_of
from dynoffload.errors import ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.accelerator.storages import size_of
from dynoffload.memory.device import Device
from dynoffload.memory.local import is_spread, is_wrapper, local, local_bytes, wrapped
from dynoffload.runtime.adoption.store import moved_bytes
from dynoffload.runtime.consumed import gradient_of
from dynoffload.runtime.updates.kept_state import state_of
from dynoffload.runtime.updates.update import can_split

_STATES = {"SGD": 0, "ASGD": 1, "Adagrad": 1, "Muon": 1, "RMSprop": 1, "Rprop": 2}
_STATES_OF_ADAM = 2
_SWITCHES = ("momentum", "amsgrad", "centered")  # options; each that is on adds a state tensor
_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = (torch.strided, torch.sparse_coo, *_COMPRESSED)
SCALARS = 32  # bytes of step counts and the like: up to four one-element tensors a parameter


class States:
    """Bytes that an optimizer keeps for each parameter, or will keep from its first step on.

    It reads no content. Build a new one for each use, as groups and their options change.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = {parameter: group for group in groups for parameter in group["params"]}

    def steps(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer updates ``parameter``."""
        return parameter in self._groups

    def group(self, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        """Return the hyperparameters of ``parameter``, None if it is not updated."""
        return self._groups.get(parameter)

    def sizes(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each state tensor that exists, or else will exist if it is trained;
        step counts and the like are left out."""
        return self.kept(parameter) or self.coming(parameter)

    def kept(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each existing state tensor."""
        if self._optimizer is None or isinstance(self._optimizer, HostOptimizer):
            return []  # `HostOptimizer` keeps nothing where the parameter is
        # Plain dict access: the observed state of a session would apply pending updates first.
        entry = dict.get(self._optimizer.state, parameter)
        tensors = [value for value in (entry or {}).values() if isinstance(value, torch.Tensor)]
        return [local_bytes(one) for one in tensors if one.numel() > 1]

    def coming(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor that the first step of ``parameter`` makes."""
        group = self._groups.get(parameter)
        if group is None or self._optimizer is None or not is_trained(parameter):
            return []
        count, element = local(parameter).numel(), parameter.element_size()
        sizes = [count * element] * _states_of(self._optimizer, group)
        if type(self._optimizer).__name__ == "Adafactor":
            if not can_split(self._optimizer):  # transformers' version: at least single precision
                element = max(4, element)
                sizes = [count * element] * len(sizes)
            *outer, inner = parameter.shape or (1,)
            # Means over rows and over columns; of a vector, all of it.
            means = [math.prod(outer), math.prod(outer[:-1]) * inner] if outer else [inner]
            sizes += [mean * element for mean in means]
        return sizes

    def paged(self, parameter: torch.Tensor, least: int, slices: int) -> list[int]:
        """Return those of `sizes` whose tensors are paged with the parameter. Tensors below
        ``least`` bytes are not; ``slices`` is how many slices page the parameter, 1: whole."""
        nbytes, sizes = local_bytes(parameter), self.sizes(parameter)
        if slices > 1:
            return [size for size in sizes if size == nbytes]
        return [size for size in sizes if size >= min(least, nbytes)]

    def update_bytes(
        self, parameter: torch.Tensor, page: int, least: int, *, slices: int, queues: bool
    ) -> int:
        """Return the pool bytes pinned while a parameter, or one slice of it, is updated.

        It counts the regions of its storage, its gradient and all paged state, in whole pages. With
        ``queues`` a slice of zeros is added: it replaces missing gradients of later steps that
        are pending behind a step with a gradient.

        Args:
            parameter: a paged parameter; if frozen, only its storage counts.
            page: bytes of a page.
            least: smaller tensors are not paged.
            slices: number of slices that page it; 1 for whole.
            queues: steps without a gradient may be pending for a slice.
        """
        nbytes, paged = local_bytes(parameter), self.paged(parameter, least, slices)
        if slices > 1:
            regions = 2 + len(paged) + queues if is_trained(parameter) else 1
            return padded(-(-nbytes // slices), page) * regions
        sizes = [moved_bytes(parameter), *([nbytes, *paged] if is_trained(parameter) else [])]
        return sum(padded(size, page) for size in sizes)


def padded(nbytes: int, page: int) -> int:
    """Return the bytes of whole pages that hold ``nbytes``."""
    return -(-nbytes // page) * page


def state_tensors(optimizer: Optimizer | None) -> int:
    """Return the largest number of parameter-sized state tensors of any group, per parameter."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max((_states_of(optimizer, group) for group in groups), default=0)


def _states_of(optimizer: Optimizer | None, group: Mapping[str, Any]) -> int:
    if isinstance(optimizer, HostOptimizer):
        return 0  # none where the parameter is
    name = type(optimizer).__name__
    if name == "Adafactor":
        return int(group.get("beta1") is not None)
    if name == "Muon":
        return 1  # its momentum cannot be switched off
    return _STATES.get(name, _STATES_OF_ADAM) + sum(bool(group.get(key)) for key in _SWITCHES)


def is_trained(parameter: torch.Tensor) -> bool:
    """Return whether steps update ``parameter``: it gets gradients, or still has one."""
    return parameter.requires_grad or (parameter.is_leaf and parameter.grad is not None)


def images_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes that a step changes: trained parameters and optimizer state."""
    states = States(optimizer)
    return sum(
        local_bytes(parameter) + sum(states.sizes(parameter))
        for parameter in model.parameters()
        if is_trained(parameter)
    )


def ordinary_bytes(
    model: nn.Module, optimizer: Optimizer | None, device: Device | None = None
) -> int:
    """Return the bytes of ``model``'s tensors stored outside ``device``, as they are now.

    It counts parameters, gradients, optimizer state and buffers: each storage once and whole, none
    on the meta device. It reads no content, so it never blocks and applies no deferred update.
    One to two microseconds a tensor: call it once a step.
    """
    found: dict[int, int] = {}
    for whole in tensors_of(model, optimizer):
        for tensor in (whole,) if whole.layout is torch.strided else parts_of(whole):
            if tensor.is_meta:
                continue
            if device is None or device.owner(tensor) < 0:
                storage = tensor.untyped_storage()
                found[storage._cdata] = size_of(storage)
    return sum(found.values())


def whole_bytes(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Return the bytes of a step of ``model`` that touches everything, without activations.

    It counts what exists (see `ordinary_bytes`) and, for each trained parameter, a missing gradient
    and missing optimizer state. Some ten microseconds a parameter.
    """
    states = States(optimizer)
    total = ordinary_bytes(model, optimizer)
    for parameter in model.parameters():
        if is_lazy(parameter) or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
            continue
        if parameter.is_meta:
            total += local_bytes(parameter)
        if parameter.requires_grad and gradient_of(parameter) is None:
            total += local_bytes(parameter)
        if not states.kept(parameter) and (coming := states.coming(parameter)):
            total += SCALARS + sum(coming)
    return total


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield parameters with their gradients and optimizer state, and buffers; it reads no content.

    Of sharded tensors it yields this process's part, and aliases of its memory.
    """
    elsewhere = optimizer is None or isinstance(optimizer, HostOptimizer)
    whole = optimizer is not None and not elsewhere and not can_split(optimizer)
    states = {} if optimizer is None or elsewhere or whole else optimizer.state
    for parameter in model.parameters():
        if torch._C._functorch.is_functorch_wrapped_tensor(parameter):
            continue  # put there temporarily by a functional call
        yield from wrapped(parameter)
        gradient = gradient_of(parameter) if parameter.is_leaf else None
        if gradient is not None:
            yield local(gradient)
        # Plain dict access: the observed state of a session would apply pending updates first.
        entry = dict.get(states, parameter)
        for value in tuple(entry.values()) if entry else ():
            if isinstance(value, torch.Tensor):
                yield local(value)
    if optimizer is not None and whole:
        for _, tensor in state_of(optimizer):
            yield local(tensor)
    yield from model.buffers()
    for aliases in aliases_of(model).values():
        yield from aliases


def storages_outside(model: nn.Module, device: Device) -> list[torch.UntypedStorage]:
    """Return the storages of ``model``'s parameters and buffers outside ``device``."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in parts_of(tensor):
            if not part.is_meta and device.owner(part) < 0:
                storage = part.untyped_storage()
                found[storage._cdata] = storage
    return list(found.values())


def largest_outside(
    model: nn.Module, optimizer: Optimizer | None, device: Device
) -> tuple[str, int, str]:
    """Return the name of the largest tensor outside ``device``, its storage's bytes and a
    description; "", 0 and "" if there is none. It reads no content."""
    found = "", 0, ""
    for name, tensor, kind in _named_tensors(model, optimizer):
        parts = [] if tensor.is_meta else [p for p in parts_of(tensor) if device.owner(p) < 0]
        nbytes = sum(part.untyped_storage().nbytes() for part in parts)
        if nbytes > found[1]:
            part = " that is part of a larger tensor" if nbytes > local_bytes(tensor) else ""
            found = repr(name), nbytes, f", a {kind}{part}"
    return found


def _named_tensors(
    model: nn.Module, optimizer: Optimizer | None
) -> Iterator[tuple[str, torch.Tensor, str]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, "parameter"
        gradient = gradient_of(parameter) if parameter.is_leaf else None
        if gradient is not None:
            by_graph = "gradient of backward(create_graph=True)"
            yield f"{name}.grad", gradient, by_graph if gradient.requires_grad else "gradient"
    for name, buffer in model.named_buffers():
        yield name, buffer, "buffer"
    if optimizer is not None and not isinstance(optimizer, HostOptimizer):
        names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        for name, tensor in state_of(optimizer, names):
            yield name, tensor, "tensor of optimizer state"


def check_stored(model: nn.Module, *, accelerator: bool = False) -> None:
    """Refuse parameters and buffers of which the memory is not known, or is not paged there.

    Raises:
        ConfigError: naming the tensor, its class and the remedy.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        why = _unknown(tensor, accelerator=accelerator)
        if why:
            kind = type(tensor).__name__
            raise ConfigError(
                f"{name!r} of this {type(model).__name__} is a {kind}, {why}, or use plain tensors"
            )


def _unknown(tensor: torch.Tensor, *, accelerator: bool) -> str:
    """Return why the memory of a parameter or buffer is not known and what helps, "" if it is."""
    parts = [local(tensor)]
    if isinstance(tensor, nn.Parameter):
        parts = wrapped(tensor)
        if any(one.is_quantized or not _has_memory(one) for one in parts):
            return "whose class stores its values in a way of its own: train without offload()"
        if is_wrapper(tensor) and not is_spread(tensor):
            if tensor.requires_grad:
                return "which wraps other tensors and is trained: freeze it"
            if accelerator or any(one.is_meta for one in parts):
                return "which wraps other tensors: train it in memory of the CPU"
    if any(one.layout not in _LAYOUTS or one.is_nested for one in (tensor, *parts)):
        return "whose class stores its values in a way of its own: train without offload()"
    return ""


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage of ``tensor``, if it has one, has memory."""
    try:
        return tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() >= 0
    except RuntimeError:
        return False


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that make up ``tensor``."""
    if tensor.layout is torch.strided:
        return tuple(wrapped(tensor))
    with torch._C._DisableTorchDispatch():  # guarded ones are asked for their parts to be fetched
        if tensor.layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
