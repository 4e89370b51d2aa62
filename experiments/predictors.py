"""Predictors that are told what to predict: the true future, or a wrong one.

`watching` has a network tell which of its modules with parameters it visits, and `Clairvoyant`
predicts, before each step, what such a run of the same step visited: the best that any pilot could
do. `LyingPilot` shows that a wrong prediction costs time at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from dynoffload.pilot.pilot import Prediction
from dynoffload.planning.blocks import Block, Vocabulary
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
    """Return a list to which the path of each module with parameters is added as it is called."""
    visited: list[str] = []
    for path, module in _with_parameters(model).items():
        module.register_forward_pre_hook(lambda _, __, path=path: visited.append(path))
    return visited


class Clairvoyant:
    """A `dynoffload.runtime.migration.forecast.Predictor` that is told what will run."""

    def __init__(self, model: nn.Module) -> None:
        self.vocabulary = _vocabulary(model, _with_parameters(model))
        self._orders: list[list[int]] = []

    def check(self, network: str) -> None:
        """Accept any network: it was made for one."""

    def tell(self, order: Sequence[str]) -> None:
        """The next step will visit the modules of these paths, in this order."""
        self._orders.append([self.vocabulary.index_of(path) for path in order])

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return what was told of the next step."""
        return Prediction(self._orders.pop(0), 0.0)


class LyingPilot:
    """Predicts whatever ``orders`` say, one after the other, for a network it claims to know.

    Args:
        model: the network.
        orders: block numbers; negative ones and those past the end name blocks that do not exist.

    Attributes:
        asked: how often it was.
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
