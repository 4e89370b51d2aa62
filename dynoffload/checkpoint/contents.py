"""Collects the state of a model and an optimizer under the names that a checkpoint uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint.extents import UNPLACED, Extents, Held, check_savable
from dynoffload.checkpoint.values import KIND, TENSOR, encode
from dynoffload.errors import CheckpointError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.accelerator.storages import place_of
from dynoffload.memory.local import is_spread
from dynoffload.memory.pieces import is_dense

NO_VALUES = "params", "param_names"
"""Keys of a parameter group that the checkpoint replaces by the model's own names."""


def tensors_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return parameters and persistent buffers, in the order of ``state_dict``.

    Returns:
        Each tensor under its first name, and a map from each further name to the first one.

    Raises:
        CheckpointError: a tensor cannot be saved or loaded.
    """
    found: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        buffers = {n: b for n, b in module._buffers.items() if n not in transient}
        for own, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is None:
                continue
            name = f"{path}.{own}" if path else own
            known = first.setdefault(_memory(name, tensor), name)
            if known == name:
                found[name] = tensor
            else:
                tied[name] = known
    return found, tied


def _memory(name: str, tensor: torch.Tensor) -> object:
    """Return a key that two tensors share if and only if they are the same tensor."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    check_savable(name, tensor)
    if is_spread(tensor):
        return id(tensor)
    return place_of(tensor), tensor.dtype, tensor.shape, tensor.stride()


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return each parameter's first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def stateful_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with extra state, by the name that ``state_dict`` gives to that state."""
    return {
        f"{path}._extra_state" if path else "_extra_state": module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def groups_of(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        CheckpointError: a parameter is not the model's.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{list(parameter.shape)} that is not of this model, so it would not be in the "
                    "checkpoint: pass one module that holds all parameters of the optimizer"
                )
        groups.append([names[parameter] for parameter in group["params"]])
    return groups


def type_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's type in a checkpoint."""
    kind = type(optimizer).__name__
    return f"{kind} of {optimizer.kind}" if isinstance(optimizer, HostOptimizer) else kind


def encode_optimizer(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], kept: Kept
) -> dict[str, Any]:
    """Return an optimizer's type, groups and state, encoded by `values`; adds tensors to ``kept``.

    Raises:
        CheckpointError: a value cannot be encoded or placed, or a parameter has no name.
        StepLostError: a step of a `HostOptimizer` was interrupted.
    """
    if isinstance(optimizer, HostOptimizer):
        optimizer.settle()
    groups, state = [], {}
    everyone = zip(optimizer.param_groups, groups_of(optimizer, names), strict=True)
    for number, (group, parameters) in enumerate(everyone):
        values = {k: v for k, v in group.items() if k not in NO_VALUES}
        groups.append(
            {"parameters": parameters, "values": encode(values, f"group {number}", kept.put)}
        )
        for parameter, name in zip(group["params"], parameters, strict=True):
            if parameter in optimizer.state:
                put = functools.partial(kept.put, of=parameter)
                state[name] = {
                    key: encode(item, f"{name}.{key}", put)
                    for key, item in optimizer.state[parameter].items()
                }
    return {"type": type_of(optimizer), "groups": groups, "state": state}


class Kept(dict[str, Held]):
    """Tensors found while encoding values, by the names under which they are saved.

    Args:
        extents: of the model that the optimizer trains.
    """

    def __init__(self, extents: Extents) -> None:
        super().__init__()
        self._extents = extents

    def put(
        self, path: str, tensor: torch.Tensor, of: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Add ``tensor``; ``of`` is the parameter whose state it is, if any; see `values.Put`.

        Raises:
            CheckpointError: it cannot be saved, or its place in the whole tensor is unknown.
        """
        check_savable(path, tensor)
        held = Extents().held(tensor, tensor) if of is None else self._extents.held(tensor, of)
        if held.extent is None and of in self._extents and tensor.numel() != 1:
            raise CheckpointError(
                f"optimizer state {path!r} has shape {list(tensor.shape)}, and its parameter, this "
                f"rank's experts, {list(of.shape)}: {UNPLACED}, or save without the "  # type: ignore[union-attr]
                "optimizer"
            )
        name = path
        while name in self:
            name += "'"
        self[name] = held
        encoded: dict[str, Any] = {KIND: TENSOR, "name": name}
        part = held.extent is not None and not is_spread(tensor)
        if not part and not tensor.is_contiguous() and is_dense(tensor):
            encoded["stride"] = list(tensor.stride())
        if tensor.dtype == torch.complex128:
            encoded["pairs"] = True
        if tensor.device.type != "cpu":
            encoded["device"] = tensor.device.type
        return encoded
