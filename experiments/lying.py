"""A pilot that predicts what it was given: a wrong prediction costs time at most."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dynoffload.pilot.pilot import Prediction
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.network import fingerprint


class LyingPilot:
    """Predicts whatever ``orders`` say, one after the other, for a network it claims to know.

    Args:
        model: the network.
        orders: block numbers; negative ones and those past the end name blocks that do not exist.

    Attributes:
        asked: how often it was.
    """

    def __init__(self, model: nn.Module, orders: Sequence[Sequence[int]]) -> None:
        paths = [path for path, module in model.named_modules() if not list(module.children())]
        idioms = Idioms(0, 0, 0, 0, 0, 0)
        blocks = tuple(
            Block(index, path, "", (path,), 0, 0, idioms) for index, path in enumerate(paths)
        )
        self.vocabulary = Vocabulary(fingerprint(model), blocks)
        self._orders = list(orders)
        self.asked = 0

    def check(self, network: str) -> None:
        """Accept any network."""

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return the next order."""
        order = self._orders[self.asked % len(self._orders)] if self._orders else []
        self.asked += 1
        return Prediction(list(order), 0.0)
