"""Modules that `torch.compile` made, on an accelerator.

Compiled code takes addresses and has no hooks inside. So all parameters of a compiled module are
fetched before its call, and stay, as ordinary tensors without guards, until it ends. What it saves
for backward stays from when a node of the graph takes it until the next node does.

A module that is not compiled when hooks are installed, or whose parameters take more than a part of
the pool, runs as it was written (see [Note: not dispatched] in `dynoffload.runtime.residency`). So
does the root, inside which the paging of a session begins and ends.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dynoffload.around import after_call, before_call, is_compiled
from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import compiling, fit, is_guarded, unguard
from dynoffload.memory.accelerator.rows import NOBODYS, tensors_over
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.operators import tensors_of
from dynoffload.runtime.passes.saved import InPlace
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_SHARE = 2  # one over the part of the pool that a compiled module's parameters may take


class CompiledModules:
    """Runs the compiled modules of one session."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._module: nn.Module | None = None  # that runs
        self._regions: list[int] = []  # that it may touch
        self._tensors: list[tuple[torch.Tensor, int, int]] = []  # there, with region and version
        self._saved: dict[int, list[weakref.ref[InPlace]]] = {}  # tensors over them, for backward
        self._calls = ExitStack()
        self._node: Any = None  # of the graph, that was given `_held` last
        self._held: list[int] = []
        self._warned = False

    def watch(
        self,
        watching: ExitStack,
        model: nn.Module,
        units: Sequence[Unit],
        on_visit: Callable[[Unit, nn.Module, Sequence[Any]], None],
    ) -> None:
        """Install hooks until ``watching`` is closed.

        Args:
            watching: is given the functions that remove them.
            model: the root.
            units: of the model.
            on_visit: called with each unit in a module that is about to run.
        """
        by_module: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            by_module.setdefault(unit.module, []).append(unit)
        within = {
            module: [u for inner in module.modules() for u in by_module.get(inner, ())]
            for module in model.modules()
            if module is not model and is_compiled(module)
        }
        watching.callback(self.end)
        for module, inside in within.items():
            slices = any(u.number is not None or u.gathers for u in inside)
            if not inside or slices or any(slot.is_slice for u in inside for slot in u.slots):
                continue

            def before(
                one: nn.Module, args: Any, kwargs: Any, inside: Sequence[Unit] = inside
            ) -> None:
                given = [tensor for tensor in tensors_of((args, kwargs)) if is_guarded(tensor)]
                self._begin(one, inside, given, lambda unit: on_visit(unit, one, args))

            watching.callback(before_call(module, before, {module}).remove)
            watching.callback(after_call(module, self._end_call, {module}).remove)

    # A call

    @property
    def running(self) -> bool:
        """Whether one of them runs."""
        return self._module is not None

    def _begin(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        given: Sequence[torch.Tensor],
        visit: Callable[[Unit], None],
    ) -> None:
        """Begin a call with the guarded tensors ``given``, among others."""
        if self.running or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return
        tensors: list[tuple[torch.Tensor, int]] = []
        tensors += [(slot.parameter, slot.region) for unit in units for slot in unit.slots]
        tensors += [(tensor, self._device.lookup(tensor)) for tensor in given]
        regions = {region for _, region in tensors}
        if min(regions) <= NOBODYS:  # a row, or of another session
            return
        taken = sum(map(self._device.size, regions))
        if taken > self._device.capacity // _SHARE:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s is compiled, and its parameters of %s take more than half of the pool of "
                    "%s: such modules run as they were written; compile smaller ones, or raise "
                    "the budget",
                    type(getattr(module, "_orig_mod", module)).__name__,
                    format_bytes(taken),
                    format_bytes(self._device.capacity),
                )
            return
        for unit in units:
            visit(unit)
        self._open(module, tensors)

    @uninterrupted
    def _open(self, module: nn.Module, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        regions = list(dict.fromkeys(region for _, region in tensors))
        self._device.use(regions)
        self._regions, self._module = regions, module
        for tensor, region in tensors:
            self._tensors.append((tensor, region, tensor._version))
            unguard(tensor)
        self._calls.enter_context(compiling())

    @uninterrupted
    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self._module:
            return
        self._module = None
        self._calls.close()
        tensors, self._tensors = self._tensors, []
        regions, self._regions = self._regions, []
        written = [region for one, region, version in tensors if one._version != version]
        if written:
            self._device.use(written, written)
            self._device.used(written)
        for tensor, _, _ in tensors:
            fit(tensor)
        for tensor in tensors_of(output):  # views of parameters
            fit(tensor)
        self._guard_others(Counter(r for one, r, _ in tensors if isinstance(one, nn.Parameter)))
        self._device.used(regions)

    def saved(self, one: InPlace) -> None:
        """Know of a tensor over a parameter's memory that is saved for backward."""
        self._saved.setdefault(one.region, []).append(weakref.ref(one))

    def _guard_others(self, known: Counter[int]) -> None:
        """Guard views of parameters that code has put aside, given how many tensors are ``known``
        by region."""
        for region, count in known.items():
            saved = self._saved[region] = [one for one in self._saved.get(region, ()) if one()]
            storage = self._device.storage(region)
            if users_of(storage) > 1 + count + len(saved):
                for tensor in tensors_over(storage):
                    fit(tensor)

    # Backward

    @uninterrupted
    def hold(self, region: int) -> bool:
        """Keep a region of what a compiled module saved, for the running node of the graph.

        Returns:
            Whether there is such a node.

        Raises:
            BudgetError: what the node takes does not fit together.
        """
        node: Any = torch._C._current_autograd_node()
        if node is not self._node:
            self.release()
            self._node = node
        if node is None:
            return False
        if region not in self._held:
            try:
                self._device.use([region])
            except BudgetError as error:
                error.add_note(
                    "dynoffload: backward of a compiled module takes all that it saved at once: "
                    "raise the budget, or compile smaller modules"
                )
                raise
            self._held.append(region)
        return True

    @uninterrupted
    def release(self) -> None:
        """Let go what the last node held; it has ended."""
        held, self._held, self._node = self._held, [], None
        if held:
            self._device.used(held)

    def end(self) -> None:
        """End a call whose end was not seen, and let go what is held."""
        if self._module is not None:
            self._end_call(self._module, (), None)
        self.release()
