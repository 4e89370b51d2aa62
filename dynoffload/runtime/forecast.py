"""What comes next, as far as anybody knows: the last order, a pilot's prediction, or nothing.

The forecast watches which blocks a sample runs, tells the learner, and turns a predicted order of
blocks into the order of units that the migrator plans by. It never moves a byte.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.planning.blocks import UNSEEN, Block, Vocabulary
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.network import fingerprint, shape_key
from dynoffload.profiler.sample import Features, Sample, describe_sample
from dynoffload.runtime.hooks import Hook
from dynoffload.runtime.units import Unit

logger = logging.getLogger(__name__)

_ZERO = Idioms(0, 0, 0, 0, 0, 0)
_STEADY = 4  # steps of one and the same order after which there is nothing to learn


class Predictor(Protocol):
    """Whatever predicts block orders: a `Pilot`, or a user's own."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The blocks it speaks of."""

    def predict(self, sample: Sample) -> Any:
        """Return an object whose ``blocks`` is the predicted order, as indices."""

    def check(self, fingerprint: str) -> None:
        """Raise `PilotError` if it was made for another network."""


class Forecast:
    """Predicts and records the order of blocks, sample by sample.

    Args:
        model: the root.
        units: what the migrator watches.
        policy: ``"pilot"``, ``"repeat"`` or ``"on-demand"``.
        pilot: a trained predictor; ``"auto"``: learn one; None: repeat the last order.
        features: the user's featurizer, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        policy: str,
        pilot: Predictor | str | None,
        features: Features | None,
    ) -> None:
        self._model, self._features = model, features
        self._units = {unit.path: unit for unit in units}
        self._predictor: Predictor | None = None
        self._learner: OnlineLearner | None = None
        network = fingerprint(model)
        if policy != "pilot" or pilot is None:
            self.vocabulary = _vocabulary_of(network, units)
        elif pilot == "auto":
            self.vocabulary = _vocabulary_of(network, units)
            self._learner = OnlineLearner(self.vocabulary)
        else:
            assert not isinstance(pilot, str)
            pilot.check(network)
            self.vocabulary = pilot.vocabulary
            if isinstance(pilot, Pilot):
                self._learner = OnlineLearner(self.vocabulary, pilot=pilot, grow=False)
            else:
                self._predictor = pilot
        self._grows = pilot == "auto"
        self._repeats = policy != "on-demand"
        self._thread: threading.Thread | None = None
        self._steady = 0
        self._sample: Sample | None = None
        self._inside = 0
        self._order: list[int] = []
        self._last: list[int] | None = None
        self.predicted: list[int] | None = None
        self.actual: list[int] = []
        self.accuracy = math.nan
        self.seconds = 0.0
        self._hooks: list[Hook] = []
        self._handles = self._watch()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Unit] | None:
        """A sample begins: return the order of units it will probably visit, or None."""
        self._order, self._inside = [], 0
        self._sample = None
        self.predicted = self._last if self._repeats else None
        if self._learner is not None or self._predictor is not None:
            self._sample = describe_sample(self._model, args, kwargs, self._features)
            source = self._learner if self._learner is not None else self._predictor
            assert source is not None
            prediction = source.predict(self._sample)
            if prediction is not None:
                self.predicted = list(prediction.blocks)
                self.seconds = prediction.seconds
        return None if self.predicted is None else self._units_of(self.predicted)

    def end(self) -> None:
        """The sample's forward is over: learn from what ran."""
        self.actual = self._order
        self.accuracy = math.nan
        if self.predicted is not None:
            self.accuracy = block_order_accuracy(self.predicted, self.actual)
        if self._learner is not None and self._sample is not None:
            self._learner.observe(self._sample, self.actual)
            self._steady = self._steady + 1 if self.actual == self._last else 0
            if self._grows and self._learner.due and self._steady < _STEADY:
                self._learn()
        self._last = self.actual

    def names(self, blocks: Sequence[int] | None) -> tuple[str, ...] | None:
        """Return the names of ``blocks`` as reports show them."""
        if blocks is None:
            return None
        known = self.vocabulary.blocks
        return tuple(known[b].name if 0 <= b < len(known) else "(unseen)" for b in blocks)

    def close(self) -> None:
        """Take the hooks off and wait for a learner under way."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._thread.join()

    def _learn(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        learner = self._learner
        assert learner is not None

        def work() -> None:
            pilot = learner.learn()
            logger.info("a pilot (%s) was learned from the steps so far and steers now", pilot.kind)

        self._thread = threading.Thread(target=work, name="dynoffload-learner", daemon=True)
        self._thread.start()

    def _units_of(self, blocks: Sequence[int]) -> list[Unit]:
        known = self.vocabulary.blocks
        found = []
        for block in blocks:
            if 0 <= block < len(known):
                for path in known[block].visits:
                    unit = self._units.get(path)
                    if unit is not None:
                        found.append(unit)
        return found

    def _watch(self) -> list[RemovableHandle]:
        modules = dict(self._model.named_modules())
        handles = []
        for path in dict.fromkeys(block.path for block in self.vocabulary.blocks):
            module = modules.get(path)
            if module is not None:
                nests = any(b.path == path and b.visits != (path,) for b in self.vocabulary.blocks)
                handles.append(self._hook(module, path, nests))
                if nests:
                    handles.append(module.register_forward_hook(Hook(self._out), always_call=True))
        return handles

    def _hook(self, module: nn.Module, path: str, nests: bool) -> RemovableHandle:
        index_of, repeated = self.vocabulary.index_of, path in self.vocabulary.repeated

        def call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._inside:
                index = index_of(path, shape_key(args, kwargs) if repeated else "")
                self._order.append(index if index >= 0 else UNSEEN)
            self._inside += nests

        hook = Hook(call)
        self._hooks.append(hook)
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _out(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1


def _vocabulary_of(network: str, units: Sequence[Unit]) -> Vocabulary:
    """Return the vocabulary in which each unit is a block."""
    blocks = tuple(
        Block(
            index=number,
            path=unit.path,
            variant="",
            visits=(unit.path,),
            regions=tuple(slot.name for slot in unit.slots),
            nbytes=sum(s.parameter.numel() * s.parameter.element_size() for s in unit.slots),
            activation_bytes=0,
            forward_s=0.0,
            backward_s=0.0,
            idioms=_ZERO,
        )
        for number, unit in enumerate(units)
    )
    return Vocabulary(network, blocks)
