"""Moves gradients of paged parameters into regions as backward completes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

from dynoffload.distributed.replicas import as_backward_ends
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import Store
from dynoffload.runtime.experts.gradients import FusedGradients
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.passes.activations import Activations
from dynoffload.runtime.updates.deferred_optimizer import DeferredOptimizer

logger = logging.getLogger(__name__)


class Collector:
    """Adopts gradients, and calls ``on_gradient`` after each.

    If the model is ``replicated``, gradients change when backward ends; see
    `dynoffload.distributed.replicas`. ``last`` names the parameter of the latest gradient.
    """

    def __init__(
        self,
        store: Store,
        rows: FusedStore,
        gradients: FusedGradients,
        activations: Activations,
        updates: DeferredOptimizer | None,
        *,
        replicated: bool,
        on_gradient: Callable[[], None],
    ) -> None:
        self._store, self._rows, self._gradients = store, rows, gradients
        self._activations, self._updates = activations, updates
        self._replicated, self._on_gradient = replicated, on_gradient
        self._awaits_end = self._ended = False
        self._warned: set[str] = set()
        self.last = ""

    def hooks(
        self, shards: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Callable[[torch.Tensor], None]]]:
        """Yield each parameter and the callback for its complete gradient. For those of ``shards``
        that are not paged, the callback gives the gradient memory of its own."""
        for slot in self._store.slots.values():
            yield slot.parameter, partial(self._collect, slot)
        for fused in self._rows:
            yield fused.parameter, partial(self._collect_fused, fused)
        for part in shards:
            if part not in self._store.slots:
                yield part, partial(self._collect_part, part)

    def begin_forward(self) -> None:
        """Record that no backward is running."""
        self._awaits_end = False

    def end(self) -> None:
        """Stop adopting gradients."""
        self._ended = True

    def adopt_all(self, between: Callable[[], None] = lambda: None) -> None:
        """Adopt all existing gradients; ``between`` is called before each."""
        for slot in self._store.slots.values():
            between()
            self._store.adopt_gradient(slot)
        for fused in self._rows:
            between()
            self._gradients.adopt(fused)

    @uninterrupted
    def adopt_reduced(self) -> None:
        """After backward, or without one on this rank: adopt gradients of parameters that only
        other ranks used."""
        self._awaits_end = False
        if self._replicated and not self._ended:
            self.adopt_all()

    @uninterrupted
    def _collect(self, slot: Slot, parameter: torch.Tensor) -> None:
        self._activations.settle()
        self._store.adopt_gradient(slot)
        self._note(slot.name)
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            self._warn_once(
                f"backward(create_graph=True) made the gradient of {slot.name!r}: gradients with a "
                "graph, and what that graph saves, stay in memory beside the budget; use "
                "torch.autograd.grad(..., create_graph=True) for the term that needs it, and plain "
                "backward() for gradients",
                once="graphs",
            )

    @uninterrupted
    def _collect_fused(self, fused: Fused, parameter: torch.Tensor) -> None:
        self._activations.settle()
        self._gradients.adopt(fused)
        self._note(fused.name)

    def _collect_part(self, part: nn.Parameter, parameter: torch.Tensor) -> None:
        self._store.part_gradient(part)

    def _note(self, name: str) -> None:
        self.last = name
        self._on_gradient()
        if self._updates is None:
            self._warn_once(
                "gradients are made, but offload() was given no optimizer: its state is not under "
                "the budget, and no step is recorded; pass offload(model, optimizer, ...)",
                once="no optimizer",
            )
        if self._replicated and not self._awaits_end:
            self._awaits_end = True
            as_backward_ends(self.adopt_reduced)

    def _warn_once(self, text: str, *, once: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(text)
