"""Stand-ins for fused parameters in experts' code, indexed by expert, with per-expert gradients.

In plain PyTorch, ``weight[e]`` has a gradient of the whole parameter's shape for each expert hit,
zero except for one slice. `Parts` replaces the parameter in such code. Indexing it announces a use
of that slice. The slice's gradient is written into the gradient's row, and autograd gets the row.
All other access is forwarded to the parameter.

Experts' classes of transformers run their own eager code with `Parts` in place of the fused
parameters. So results equal those of the eager implementation bit for bit, and no class needs
special handling. Other implementations call `stand_ins`.

[Note: eager]  A model configured with "eager" uses `run_eager` while a session of it is open:
transformers' registry has no entry of that name, so one is added. The model and its configuration
are unchanged, so copies and pickles of it are too.

[Note: compiled]  torch.compile does not compile a loop over the experts hit, and runs it eagerly.
With `Parts` it would compile pieces of the loop, whose results differ in bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.adoption.slots import Fused
from dynoffload.runtime.experts.gradients import FusedGradients, SliceGradients


class Gathers(Protocol):
    """Collects slice gradients into one, each time backward runs through one call's graph."""

    def put(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store the gradient of one slice, and return the stored tensor."""

    def finish(self) -> torch.Tensor | None:
        """Return the whole gradient, or None if no slice had one, and reset."""


class _Unbind(torch.autograd.Function):
    """Splits a parameter into slices; backward combines their gradients into one."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, gathers: Gathers) -> tuple[torch.Tensor, ...]:
        ctx.gathers = gathers
        ctx.set_materialize_grads(False)
        return whole.detach().unbind(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if not torch.is_grad_enabled():
            return ctx.gathers.finish(), None
        # With create_graph: accumulate as plain PyTorch does, in the same order.
        shape, total = None, None
        for number in reversed(range(len(gradients))):
            gradient = gradients[number]
            if gradient is not None:
                shape = (len(gradients), *gradient.shape)
                whole = torch.ops.aten.select_backward(gradient, shape, 0, number)
                total = whole if total is None else total + whole
        ctx.gathers.finish()  # discard what an earlier node may have written
        return total, None


class _Place(torch.autograd.Function):
    """Identity on one slice; backward stores its gradient as soon as it is computed."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, gathers: Gathers, number: int) -> torch.Tensor:
        ctx.gathers, ctx.number = gathers, number
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            return gradient, None, None
        return ctx.gathers.put(ctx.number, gradient), None, None


class Views:
    """The slices of a tensor, one autograd node each, whose gradients combine into one.

    Args:
        whole: (E, ...).
        gathers: collects the slices' gradients.
    """

    def __init__(self, whole: torch.Tensor, gathers: Gathers) -> None:
        self._whole, self._gathers = whole, gathers
        self._unbound: tuple[torch.Tensor, ...] = ()
        self._given: dict[int, torch.Tensor] = {}

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return one slice."""
        if not (torch.is_grad_enabled() and self._whole.requires_grad):
            return self._whole[number]
        if not self._unbound:
            self._unbound = _Unbind.apply(self._whole, self._gathers)  # type: ignore[no-untyped-call]
        if number not in self._given:
            made = _Place.apply(self._unbound[number], self._gathers, number)  # type: ignore[no-untyped-call]
            self._given[number] = made
        return self._given[number]


class Parts:
    """Stand-in for a fused parameter during one call of its module.

    Args:
        parameter: the module's parameter.
        fused: its slices.
        gradients: collects their gradients.
        on_use: called with the number of a slice before its use.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        fused: Fused,
        gradients: FusedGradients,
        on_use: Callable[[int], None],
    ) -> None:
        self._parameter, self._fused, self._on_use = parameter, fused, on_use
        self._views = Views(parameter, SliceGradients(gradients, fused))

    def __getitem__(self, index: Any) -> torch.Tensor:
        number = _number(index, len(self._fused.slots))
        if number is None:
            return self._parameter[index]
        self._on_use(number)
        return self._views[number]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def __len__(self) -> int:
        return len(self._parameter)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``function`` with the parameter in place of the stand-in."""
        plain = torch.utils._pytree.tree_map_only(Parts, lambda part: part._parameter, args)
        more = torch.utils._pytree.tree_map_only(Parts, lambda part: part._parameter, kwargs or {})
        return function(*plain, **more)


def _number(index: Any, count: int) -> int | None:
    """Return the number of the slice that ``index`` selects, or None if it is not one slice."""
    if isinstance(index, torch.Tensor):
        if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
            return None
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
        return None
    return index % count


# Experts' classes

_MODULE = "transformers.integrations.moe"

MakeParts = Callable[[], Mapping[str, Parts]]

_sliced: dict[int, MakeParts] = {}  # id of a module -> makes its stand-ins; only in open sessions


def run_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the eager forward of an experts' class; by slices if its parameters are paged so.

    Raises:
        ConfigError: the class has no eager forward.
    """
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None:
        raise ConfigError(
            f"{type(module).__name__} has no eager forward of its own: choose another "
            "experts_implementation for it"
        )
    parts = stand_ins(module)
    if not parts:
        return eager(module, *args, **kwargs)
    stand_in = object.__new__(type(module))
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__.update(parts)  # instance attributes are found before parameters
    if "torch._dynamo" in sys.modules:  # see [Note: compiled]
        eager = torch._disable_dynamo(eager)  # type: ignore[attr-defined]
    return eager(stand_in, *args, **kwargs)


def stand_ins(module: nn.Module) -> Mapping[str, Parts]:
    """Return the stand-ins for fused parameters of ``module`` for one call, by name; empty if no
    session is open."""
    make = _sliced.get(id(module))
    return {} if make is None else make()


def takes_all_at_once(module: nn.Module) -> str:
    """Return by which of transformers' implementations ``module`` runs its experts, if that takes
    the parameters of all at once; else ""."""
    config = getattr(module, "config", None)
    name = str(getattr(config, "_experts_implementation", None) or "")
    return "" if name in ("eager", "dynoffload") else name


def run_by_slices(module: nn.Module, make: MakeParts) -> Callable[[], None]:
    """Run the experts of ``module`` by slices until the returned function is called.

    Args:
        module: owns fused parameters. Nothing changes unless it is an experts' class of
            transformers, or its class sets ``asks_for_parts`` and calls `stand_ins` itself.
        make: returns the stand-ins for one call, by name.

    Returns:
        A function that ends this.
    """
    registry = getattr(sys.modules.get(_MODULE), "ALL_EXPERTS_FUNCTIONS", None)
    if getattr(type(module), "asks_for_parts", False):
        registry = {}
    elif registry is None or not hasattr(type(module).forward, "__wrapped__"):
        return lambda: None
    _sliced[id(module)] = make
    if "eager" not in registry:
        registry["eager"] = run_eager  # see [Note: eager]

    def end() -> None:
        _sliced.pop(id(module), None)
        if not _sliced and registry.get("eager") is run_eager:
            del registry["eager"]

    return end
