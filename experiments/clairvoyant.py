"""Knowing the future: orders that a plain run took, and a predictor that tells them.

`watching` has a network tell which of its modules with parameters it visits, and `Clairvoyant`
predicts, before each step, what such a run of the same step visited. Training is the same bit for
bit, so it is always right: the best that any pilot could do, to compare pilots with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.network import fingerprint

if TYPE_CHECKING:
    from dynoffload.profiler.input_features import InputFeatures

_NOTHING = Idioms(0, 0, 0, 0, 0, 0)


def _with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    }


def watching(model: nn.Module) -> list[str]:
    """Return a list to which the path of each module with parameters is added as it is called."""
    visited: list[str] = []
    for path, module in _with_parameters(model).items():
        module.register_forward_pre_hook(lambda _, __, path=path: visited.append(path))
    return visited


class Clairvoyant:
    """A `dynoffload.runtime.migration.forecast.Predictor` that is told what will run."""

    def __init__(self, model: nn.Module) -> None:
        self._network = fingerprint(model)
        self._orders: deque[list[int]] = deque()
        blocks = tuple(
            Block(
                index=number,
                path=path,
                variant="",
                visits=(path,),
                nbytes=sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)),
                activation_bytes=0,
                idioms=_NOTHING,
            )
            for number, (path, module) in enumerate(_with_parameters(model).items())
        )
        self.vocabulary = Vocabulary(self._network, blocks)

    def tell(self, order: Sequence[str]) -> None:
        """The next step will visit the modules of these paths, in this order."""
        self._orders.append([self.vocabulary.index_of(path) for path in order])

    def predict(self, sample: InputFeatures) -> Any:
        """Return what was told of the next step."""
        return SimpleNamespace(blocks=self._orders.popleft())

    def check(self, fingerprint: str) -> None:
        """Refuse another network."""
        if fingerprint != self._network:
            raise ValueError("this future is of another network")
