"""Measures what saved activations take beside gradients, as both are not all alive at one time.

Plain training has most activations as a forward ends, and all gradients as a backward ends. Some of
these are made after the activations were freed, and so need no memory of their own.

[Note: gradients of several uses]  Autograd adds up what the uses of a weight contribute, and only
then makes its gradient. So a gradient counts from when backward first reads its weight. Of what is
not read there, such as a table looked up twice, partial sums are temporaries, as in paged mode.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from dynoffload.memory.local import local_bytes
from dynoffload.runtime.consumed import gradient_of
from dynoffload.runtime.passes.activations import Activations


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients of ``parameters`` that exist."""
    gradients = map(gradient_of, parameters)
    return sum(local_bytes(one) for one in gradients if one is not None)


def _has_dense_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided


class Overlap:
    """Measures the steps of a paged ``model``.

    Attributes:
        alive: most bytes of saved activations in the last step.
        beside: bytes by which activations and gradients together passed all its gradients.
        kept: most bytes of gradients that were there as a forward began.
    """

    def __init__(self, model: nn.Module, activations: Activations) -> None:
        self._model, self._activations = model, activations
        self.alive = self.beside = self.kept = 0
        self._begin()

    def _begin(self) -> None:
        self._made = 0  # bytes of gradients
        self._used: set[torch.Tensor] = set()  # parameters with a gradient among these
        self._alive = self._most = self._kept = 0
        self._in_forward = True

    def begin_forward(self) -> None:
        """Called as a forward begins."""
        self._look()
        self._count()
        self._kept = max(self._kept, self._made)
        self._in_forward = True

    def use(self, parameter: torch.Tensor) -> None:
        """Called as backward uses ``parameter``, or has made its gradient."""
        if self._in_forward:  # the loop may have zeroed gradients since this began
            self._in_forward = False
            self._look()
            self._count()
        sparse = parameter.grad is not None and not _has_dense_gradient(parameter)
        if parameter.requires_grad and parameter not in self._used and not sparse:
            self._used.add(parameter)
            self._made += local_bytes(parameter)

    def collect(self, parameter: torch.Tensor) -> None:
        """Called once the gradient of ``parameter`` is complete."""
        self.use(parameter)
        self._look()

    def end_step(self) -> None:
        """Called as a step ends."""
        self._look()
        self._count()  # backward may have read parameters and not made their gradients
        self.alive, self.beside, self.kept = self._alive, self._most - self._made, self._kept
        self._begin()

    def _count(self) -> None:
        # Those that an update in backward has consumed would be there in plain training.
        self._used = {one for one in self._model.parameters() if _has_dense_gradient(one)}
        self._made = sum(map(local_bytes, self._used))

    def _look(self) -> None:
        """Take the most activations since the last look, beside the gradients made by now."""
        self._activations.settle()
        alive = self._activations.take_peak()
        self._alive = max(self._alive, alive)
        self._most = max(self._most, alive + self._made)
