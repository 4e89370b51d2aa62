"""Predictors with given predictions, the true future or a wrong one, and simple online ones.

`watching` records which units with parameters a network visits. `Clairvoyant` predicts, before
each step, what a recorded run of the same step visited: an upper bound for pilots. `LyingPilot`
predicts wrongly; this must only cost time. `RepeatLast`, `MostFrequent` and `Markov` are baselines:
they see recorded steps in order, and learn from each after they predicted it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from torch import nn

from dynoffload.pilot.features import Example
from dynoffload.pilot.pilot import Prediction
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.experts import experts_hit, slices_in, unit_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.network import fingerprint

_NOTHING = Idioms(0, 0, 0, 0, 0, 0)
_START, _END = -2, -3  # of an order; no blocks


def _vocabulary(model: nn.Module, paths: Iterable[str]) -> Vocabulary:
    blocks = (Block(n, path, "", (path,), 0, 0, _NOTHING) for n, path in enumerate(paths))
    return Vocabulary(fingerprint(model), tuple(blocks))


def with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    }


def watching(
    model: nn.Module, on_visit: Callable[[Sequence[str]], None] = lambda paths: None
) -> list[str]:
    """Return a list to which hooks append the path of each called module with parameters, or of
    the experts that the call runs; ``on_visit`` is called with these."""
    visited: list[str] = []

    def visit(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        hit = experts_hit(module, args, kwargs)
        paths = [path] if hit is None else [unit_path(path, number) for number in hit]
        visited.extend(paths)
        on_visit(paths)

    for path, module in with_parameters(model).items():
        module.register_forward_pre_hook(partial(visit, path), with_kwargs=True)
    return visited


class Clairvoyant:
    """A `dynoffload.runtime.migration.forecast.Predictor` with perfect predictions."""

    def __init__(self, model: nn.Module) -> None:
        own = with_parameters(model)
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


class Online(Protocol):
    """Predicts recorded steps one after the other."""

    def predict(self, example: Example) -> list[int]:
        """Return the predicted order; only ``example.sample`` may be used."""

    def observe(self, example: Example) -> None:
        """Learn from what the step ran."""


class RepeatLast:
    """Predicts the order of the step before."""

    def __init__(self) -> None:
        self._last: list[int] = []

    def predict(self, example: Example) -> list[int]:
        """Return the last order."""
        return self._last

    def observe(self, example: Example) -> None:
        """Remember the order."""
        self._last = list(example.blocks)


class MostFrequent:
    """Predicts the blocks that ran in at least half of the steps so far, in one fixed order.

    A block that a step runs several times counts as several. What runs for the first time takes its
    place in the fixed order behind what ran before it.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._order: list[tuple[int, int]] = []  # blocks, each with the number of its call
        self._ran: Counter[tuple[int, int]] = Counter()  # steps that ran it

    def predict(self, example: Example) -> list[int]:
        """Return the frequent blocks."""
        return [call[0] for call in self._order if 2 * self._ran[call] >= self._steps]

    def observe(self, example: Example) -> None:
        """Count the blocks."""
        self._steps += 1
        calls: Counter[int] = Counter()
        before = None
        for block in example.blocks:
            call = block, calls[block]
            calls[block] += 1
            if call not in self._ran:
                self._order.insert(0 if before is None else self._order.index(before) + 1, call)
            self._ran[call] += 1
            before = call


class Markov:
    """Predicts after each block its most frequent successor so far, from the start to the end."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._likeliest: dict[int, int] = {}
        self._longest = 0

    def predict(self, example: Example) -> list[int]:
        """Return the chain of successors, no longer than the longest order so far."""
        order: list[int] = []
        block = self._likeliest.get(_START, _END)
        while block != _END and len(order) < self._longest:
            order.append(block)
            block = self._likeliest[block]
        return order

    def observe(self, example: Example) -> None:
        """Count the successors."""
        self._longest = max(self._longest, len(example.blocks))
        for block, after in pairwise((_START, *example.blocks, _END)):
            counts = self._counts[block]
            counts[after] += 1
            if counts[after] > counts[self._likeliest.setdefault(block, after)]:
                self._likeliest[block] = after
