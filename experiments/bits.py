"""Bitwise comparison of two training states: -0 differs from +0, and a NaN equals itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynoffload.memory.local import is_wrapper, wrapped


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of parameters, gradients, buffers, optimizer state and generator states."""
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "gradients": {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()
        },
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
        "optimizer": _copied(optimizer.state_dict()),
        "random numbers": random_state(),
    }


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's default generators: the host's, and the current accelerator's
    if there is one."""
    found = {"host": torch.get_rng_state()}
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None:
        found[here.type] = torch.get_device_module(here).get_rng_state()
    return found


def first_difference(found: Any, expected: Any, what: str = "") -> str:
    """Return where two nested structures of tensors and values first differ, "" if nowhere."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{what} is no tensor"
        if is_wrapper(expected) and type(found) is type(expected):
            return first_difference(wrapped(found), wrapped(expected), what)
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            kinds = [f"{t.dtype} {list(t.shape)}" for t in (found, expected)]
            return f"{what}: {kinds[0]}, not {kinds[1]}"
        if torch.equal(_bytes(found), _bytes(expected)):
            return ""
        wrong = (_bytes(found) != _bytes(expected)).view(expected.numel(), -1).any(1)
        first = int(wrong.nonzero()[0])
        return (
            f"{what}: {int(wrong.sum())} of {expected.numel()} elements differ, first at {first}: "
            f"{found.reshape(-1)[first]} is not {expected.reshape(-1)[first]}"
        )
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return f"{what} has other keys"
        pairs = ((found[key], expected[key], f"{what}.{key}") for key in expected)
        return next(filter(None, (first_difference(*pair) for pair in pairs)), "")
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{what} is of another length"
        pairs = ((found[i], expected[i], f"{what}[{i}]") for i in range(len(expected)))
        return next(filter(None, (first_difference(*pair) for pair in pairs)), "")
    same = type(found) is type(expected) and (found == expected or expected != expected)
    return "" if same else f"{what}: {found!r:.60} is not {expected!r:.60}"


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
