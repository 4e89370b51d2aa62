"""Predictors with given predictions: the true future, or a wrong one.

`watching` records which units with parameters a network visits. `Clairvoyant` predicts, before
each step, what a recorded run of the same step visited: an upper bound for pilots. `LyingPilot`
predicts wrongly; this must only cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from dynoffload.pilot.pilot import Prediction
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.experts import experts_hit, slices_in, unit_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.network import fingerprint

_NOTHING = Idioms(0, 0, 0, 0, 0, 0)


def _vocabulary(model: nn.Module, paths: Iterable[str]) -> Vocabulary:
    blocks = (Block(n, path, "", (path,), 0, 0, _NOTHING) for n, path in enumerate(paths))
    return Vocabulary(fingerprint(model), tuple(blocks))


def _with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    }


def watching(model: nn.Module) -> list[str]:
    """Return a list to which hooks append the path of each called module with parameters, or of
    the experts that the call runs."""
    visited: list[str] = []

    def visit(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        hit = experts_hit(module, args, kwargs)
        visited.extend([path] if hit is None else (unit_path(path, number) for number in hit))

    for path, module in _with_parameters(model).items():
        module.register_forward_pre_hook(partial(visit, path), with_kwargs=True)
    return visited


class Clairvoyant:
    """A `dynoffload.runtime.migration.forecast.Predictor` with perfect predictions."""

    def __init__(self, model: nn.Module) -> None:
        own = _with_parameters(model)
        experts = (
            unit_path(path, number)
            for path, module in own.items()
            for number in range(max(slices_in(module).values(), default=0))
        )
        self.vocabulary = _vocabulary(model, (*own, *experts))
        self._orders: list[list[int]] = []

    def check(self, network: str) -> None:
        """Accept any network."""

    def tell(self, order: Sequence[str]) -> None:
        """Set the next step's order: the paths of the modules it will visit."""
        self._orders.append([self.vocabulary.index_of(path) for path in order])

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return the order set for the next step."""
        return Prediction(self._orders.pop(0), 0.0)


class LyingPilot:
    """Predicts the given ``orders`` one after the other, and accepts any network.

    Args:
        model: the network.
        orders: block numbers; negative ones and those past the end name blocks that do not exist.

    Attributes:
        asked: number of predictions so far.
    """

    def __init__(self, model: nn.Module, orders: Sequence[Sequence[int]]) -> None:
        leaves = (path for path, module in model.named_modules() if not list(module.children()))
        self.vocabulary = _vocabulary(model, leaves)
        self._orders = list(orders)
        self.asked = 0

    def check(self, network: str) -> None:
        """Accept any network."""

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return the next order."""
        order = self._orders[self.asked % len(self._orders)] if self._orders else []
        self.asked += 1
        return Prediction(list(order), 0.0)
