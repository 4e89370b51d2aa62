"""The update rule: the step of a torch optimizer, fused, on slices of masters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dynoffload.errors import ConfigError

Group = dict[str, Any]

_SERVED: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)
"""Optimizers of torch.optim with a fused CPU kernel and state per element."""

_FIXED = {"fused": True, "foreach": False, "capturable": False, "differentiable": False}
"""Options for how a step is computed, with the only values allowed."""


class Slice(NamedTuple):
    """Tensors updated together in place: flat, float32, on the CPU. ``step`` is the number of
    earlier updates, ``group`` the hyperparameters."""

    master: torch.Tensor
    gradient: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: float
    group: Group


class UpdateRule:
    """A torch optimizer, applied to slices.

    Args:
        kind: its class.
        options: constructor arguments other than parameters.

    Attributes:
        defaults: hyperparameters of a group that names none.

    Raises:
        ConfigError: ``kind`` is not supported, or an option asks for another implementation.
    """

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        if kind not in _SERVED:
            raise ConfigError(
                f"HostOptimizer cannot run {getattr(kind, '__name__', repr(kind))}: pass one of "
                f"the classes {', '.join(one.__name__ for one in _SERVED)}, which torch has fused "
                "kernels of for the CPU, or use the optimizer itself under offload()"
            )
        for name, fixed in _FIXED.items():
            if options.get(name) not in (None, fixed):
                raise ConfigError(
                    f"{name}={options[name]!r} of {kind.__name__} cannot be chosen here, as "
                    "HostOptimizer runs the fused step over masters: leave it out"
                )
        self.kind = kind
        given = {name: value for name, value in options.items() if name not in _FIXED}
        factory: Callable[..., Optimizer] = kind
        try:
            self._template = factory([nn.Parameter(torch.zeros(1))], fused=True, **given)
        except TypeError as error:
            raise ConfigError(
                f"HostOptimizer takes the options of {kind.__name__}: {error}"
            ) from error
        self.defaults: dict[str, Any] = dict(self._template.defaults)
        self._template.param_groups = []
        step = kind.step
        self._step: Callable[[Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of the per-element state of parameters in ``group``."""
        if self.kind is SGD:
            return ("momentum_buffer",) if group["momentum"] else ()
        return "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())

    def hyperparameters(self, group: Mapping[str, Any]) -> Group:
        """Return a group's entries without its parameters; tensors of one element as numbers."""
        values = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[key] = value.item()
        return {**values, **_FIXED}

    def run(self, slices: Sequence[Slice]) -> None:
        """Update ``slices`` in place."""
        alike: dict[tuple[int, bool], list[Slice]] = defaultdict(list)
        for one in slices:
            alike[id(one.group), one.step == 0].append(one)
        for (_, first), some in alike.items():
            self._run(some, first=first)

    def _run(self, slices: Sequence[Slice], *, first: bool) -> None:
        starts = first and self.kind is SGD  # it makes momentum of the first gradient
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        stand_ins = []
        for one in slices:
            stand_in = nn.Parameter(one.master)
            stand_in.grad = one.gradient
            stand_ins.append(stand_in)
            if not starts:
                state[stand_in] = dict(one.moments)
            if self.kind is not SGD:
                state[stand_in]["step"] = torch.full(
                    (), one.step, dtype=torch.float32, device="cpu"
                )
        shadow = object.__new__(self.kind)
        shadow.__dict__.update(
            self._template.__dict__,
            param_groups=[{**slices[0].group, "params": stand_ins}],
            state=state,
        )
        with torch.inference_mode(False), torch.no_grad():
            self._step(shadow)
            if starts:
                for one, stand_in in zip(slices, stand_ins, strict=True):
                    for key, kept in one.moments.items():
                        kept.copy_(state[stand_in][key])
