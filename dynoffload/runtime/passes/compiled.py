"""Modules that `torch.compile` made, on an accelerator.

Compiled code takes addresses and has no hooks inside. So all parameters of a compiled module are
fetched before its call, and stay, as ordinary tensors without guards, until it ends. What it saves
for backward stays from when a node of the graph takes it until the next node does.

Compiled code of which this cannot take care runs as it was written (see [Note: not dispatched] in
`dynoffload.runtime.residency`). So does the root, inside which the paging of a session begins and
ends.
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
from dynoffload.distributed.replicas import as_backward_ends
from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator import guarded
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import fit, is_guarded, unguard
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
        # Tensors over parameters of compiled modules that are saved for backward, by region.
        self._saved: dict[int, list[weakref.ref[InPlace]]] = {}
        self._calls = ExitStack()
        self._node: tuple[int, int] | None = None  # of the graph, that was given `_held` last
        self._task = -1  # the backward that calls `release` as it ends
        self._held: list[int] = []
        self._warned: set[str] = set()

    @property
    def running(self) -> bool:
        """Whether one of them runs."""
        return self._module is not None

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
        self._saved = {}
        modules = dict(model.named_modules())
        by_module: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            for owner in [modules[path] for path in unit.members] or [unit.module]:
                by_module.setdefault(owner, []).append(unit)
        watching.callback(self.end)
        for module in filter(is_compiled, model.modules()):
            owned = [u for inner in module.modules() for u in by_module.get(inner, ())]
            inside = list(dict.fromkeys(owned))
            regions = {region for unit in inside for region in unit.regions}
            taken, pool = sum(map(self._device.size, regions)), self._device.capacity
            if module is model:
                self._warn(module, "is the root, which pages while it runs: compile its layers")
            elif any(unit.gathers or slot.is_slice for unit in inside for slot in unit.slots):
                self._warn(module, "has parameters that are paged by slices or as shards")
            elif taken > pool // _SHARE:
                self._warn(
                    module,
                    f"has parameters of {format_bytes(taken)}, more than half of the pool of "
                    f"{format_bytes(pool)}: compile smaller modules, or raise the budget",
                )
            elif inside:
                self._saved.update((region, []) for region in regions)
                self._watch(watching, module, inside, on_visit)

    def _watch(
        self,
        watching: ExitStack,
        module: nn.Module,
        inside: Sequence[Unit],
        on_visit: Callable[[Unit, nn.Module, Sequence[Any]], None],
    ) -> None:
        def before(one: nn.Module, args: Any, kwargs: Any) -> None:
            given = [tensor for tensor in tensors_of((args, kwargs)) if is_guarded(tensor)]
            self._begin(one, inside, given, lambda unit: on_visit(unit, one, args))

        watching.callback(before_call(module, before, {module}).remove)
        watching.callback(after_call(module, self._end_call, {module}).remove)

    def _warn(self, module: nn.Module, why: str) -> None:
        name = type(getattr(module, "_orig_mod", module)).__name__
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s is compiled, and runs as it was written, as it %s", name, why)

    # A call

    def _begin(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        given: Sequence[torch.Tensor],
        visit: Callable[[Unit], None],
    ) -> None:
        """Begin a call with the guarded tensors ``given``, among others."""
        if self.running or not guarded.may_compile():
            return
        tensors: list[tuple[torch.Tensor, int]] = []
        tensors += [(slot.parameter, slot.region) for unit in units for slot in unit.slots]
        tensors += [(tensor, self._device.lookup(tensor)) for tensor in given]
        if any(region <= NOBODYS for _, region in tensors):
            self._warn(module, "is given tensors that are paged by slices or by another session")
        elif not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            self._warn(module, "is called where saved-tensor hooks are disabled")
        else:
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
        self._calls.enter_context(guarded.compiling())

    @uninterrupted
    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self._module:
            return
        self._module = None
        self._calls.close()
        tensors, self._tensors = self._tensors, []
        regions, self._regions = self._regions, []
        written = {region for one, region, version in tensors if one._version != version}
        written.update(map(self._device.lookup, guarded.take_data()))
        changed = list(written & {*regions})
        self._device.use(changed, changed)
        self._device.used(changed)
        for tensor, _, _ in tensors:
            fit(tensor)
        for tensor in tensors_of(output):  # views of parameters
            fit(tensor)
        self._guard_others({id(tensor): region for tensor, region, _ in tensors})
        self._device.used(regions)

    def saved(self, one: InPlace) -> None:
        """Know of a tensor over a parameter's memory that is saved for backward."""
        if one.region in self._saved:
            self._saved[one.region].append(weakref.ref(one))

    def _guard_others(self, known: dict[int, int]) -> None:
        """Guard views of parameters that code has put aside, given the tensors that are ``known``,
        by identity with their regions."""
        for region, count in Counter(known.values()).items():
            if region not in self._saved:
                continue
            saved = self._saved[region] = [one for one in self._saved[region] if one()]
            storage = self._device.storage(region)
            if users_of(storage) > 1 + count + len(saved):
                for tensor in tensors_over(storage):
                    fit(tensor)

    # Backward

    @uninterrupted
    def hold(self, region: int) -> bool:
        """Keep a region of what a compiled module saved, for the running node of the graph.

        Returns:
            Whether there is such a node, and it saves nothing for a graph of its own.

        Raises:
            BudgetError: what the node takes does not fit together.
        """
        running: Any = torch._C._current_autograd_node()
        task = torch._C._current_graph_task_id()
        node = None if running is None else (task, running._sequence_nr())
        if node != self._node:
            self.release()
            self._node = node
        if node is None:
            return False
        if task != self._task:
            self._task = task
            as_backward_ends(self.release)
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
        return not torch.is_grad_enabled()

    def let_go(self, region: int) -> None:
        """Hold a region no more, whose content nobody needs."""
        if region in self._held:
            self._held.remove(region)
            self._device.used([region])

    @uninterrupted
    def release(self) -> None:
        """Let go what the last node held; it has ended."""
        held, self._held, self._node = self._held, [], None
        if held:
            self._device.used(held)

    def end(self) -> None:
        """End a call or a backward whose end was not seen."""
        if self._module is not None:
            self._end_call(self._module, (), None)
        self.release()
