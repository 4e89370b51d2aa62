"""The update itself: the code of torch's own optimizer, over pieces of masters.

What it is: which optimizers are served, what they keep, and how their ``step`` is run over tensors
that are no parameters of the user's. What it is not: a kernel; those are torch's, fused wherever it
has them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from dynoffload.errors import ConfigError

Group = dict[str, Any]

SERVED: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)
"""Those of torch.optim that have a fused kernel for the CPU and state per element."""

_OURS = {"fused": True, "foreach": False, "capturable": False, "differentiable": False}
"""Options that say how a step is computed, which is decided here, and what may be asked for."""


@dataclass(eq=False)
class Part:
    """A piece that is to be updated; tensors are flat, float32, on one device.

    Attributes:
        master: changed in place.
        gradient: what it is updated by.
        moments: changed in place, by their keys.
        step: how many updates it has had.
        group: its hyperparameters.
    """

    master: torch.Tensor
    gradient: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: float
    group: Group


_OWN = ("place", "tile_bytes", "delayed", "warmup_steps", "threads", "spill_dir", "host_budget")
"""Options of `HostOptimizer` beside those of its kind, which may be misspelt too."""


class Rule:
    """One of torch's optimizers, run over parts.

    Args:
        kind: its class.
        options: what it is made with, beside parameters.

    Attributes:
        defaults: of its groups.

    Raises:
        ConfigError: it is not served, or asked to compute its step in another way.
    """

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        if isinstance(kind, Optimizer):
            raise ConfigError(
                f"HostOptimizer takes the class {type(kind).__name__}, not an optimizer of it: "
                f"pass torch.optim.{type(kind).__name__}, lr=..."
            )
        if kind not in SERVED:
            raise ConfigError(
                f"HostOptimizer cannot run {getattr(kind, '__name__', repr(kind))}: it serves "
                f"{', '.join(one.__name__ for one in SERVED)}, which torch has fused kernels of "
                "for the CPU; pass one of these, or use the optimizer itself under offload()"
            )
        for name, fixed in _OURS.items():
            if options.get(name) not in (None, fixed):
                raise ConfigError(
                    f"{name}={options[name]!r} of {kind.__name__} cannot be chosen here, as "
                    "HostOptimizer runs the fused step over masters: leave it out"
                )
        known = [name for name in inspect.signature(kind).parameters if name != "params"]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"HostOptimizer of {kind.__name__} has no option {name!r}: known are "
                    f"{', '.join((*known, *_OWN))}"
                )
        self.kind = kind
        given = {name: value for name, value in options.items() if name not in _OURS}
        factory: Callable[..., Optimizer] = kind
        self._template = factory([nn.Parameter(torch.zeros(1))], fused=True, **given)
        self.defaults: dict[str, Any] = dict(self._template.defaults)
        self._template.param_groups = []
        step = kind.step
        self._step: Callable[[Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of what is kept for each element of a parameter of ``group``."""
        if self.kind is SGD:
            return ("momentum_buffer",) if group["momentum"] else ()
        return "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())

    def hyperparameters(self, group: Mapping[str, Any]) -> Group:
        """Return those of a group as they are now, tensors as numbers, without parameters."""
        values = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[key] = value.item()
        return {**values, **_OURS}

    def run(self, parts: Sequence[Part]) -> None:
        """Update ``parts`` in place, of one device."""
        alike: dict[tuple[int, bool], list[Part]] = defaultdict(list)
        for part in parts:
            alike[id(part.group), part.step == 0].append(part)
        for (_, first), some in alike.items():
            self._run(some, first=first)

    def _run(self, parts: Sequence[Part], *, first: bool) -> None:
        device = parts[0].master.device
        fused = device.type in _get_fused_kernels_supported_devices()
        starts = first and self.kind is SGD  # which makes its momentum of the first gradient
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        stand_ins = []
        for part in parts:
            stand_in = nn.Parameter(part.master)
            stand_in.grad = part.gradient
            stand_ins.append(stand_in)
            if not starts:
                state[stand_in] = dict(part.moments)
            if self.kind is not SGD:
                where = device if fused else torch.device("cpu")
                state[stand_in]["step"] = torch.full((), part.step, device=where)
        how = {} if fused else {"fused": False, "foreach": None}
        shadow = object.__new__(self.kind)
        shadow.__dict__.update(
            self._template.__dict__,
            param_groups=[{**parts[0].group, **how, "params": stand_ins}],
            state=state,
        )
        with torch.inference_mode(False), torch.no_grad():
            self._step(shadow)
            if starts:
                for part, stand_in in zip(parts, stand_ins, strict=True):
                    for key, kept in part.moments.items():
                        kept.copy_(state[stand_in][key])
