"""Predicts each sample's order of blocks: the last order, a pilot's prediction, or none.

It turns predicted blocks into units for the migrator. A pilot's prediction is used while it was
lately at least as accurate as the last order. Where the pilot is no better, it is asked no more
(`dynoffload.runtime.migration.gates.Silence`); and only while `HostTime` allows.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch import nn

from dynoffload.around import after_call, before_call, choosing
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.labels import placed_hint
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import UNSEEN, Vocabulary
from dynoffload.profiler.experts import experts_hit, slices_in, split_path, unit_path
from dynoffload.profiler.input_features import Features, InputFeatures, describe_input
from dynoffload.profiler.network import fingerprint, shape_key
from dynoffload.profiler.routing import RoutingProbe, hinted
from dynoffload.runtime.adoption.units import Unit, vocabulary_of
from dynoffload.runtime.migration.gates import (
    AVERAGE,
    LEAST,
    Silence,
    Standing,
    Trial,
    likely,
    stall_ratio,
)
from dynoffload.runtime.migration.host_time import OPENING_S, HostTime
from dynoffload.runtime.migration.probing import Probing
from dynoffload.runtime.migration.steps import Step
from dynoffload.runtime.passes.hooks import Hook, in_backward
from dynoffload.runtime.unseen import unseen
from dynoffload.telemetry import StepStats

logger = logging.getLogger(__name__)

_MIN_STEPS = 4  # steps observed before a pilot's accuracy counts
_TRACK_EVERY = 4  # a pilot that is not in use is tracked in one of so many steps
_PILOT, _LAST = "the pilot", "the last order"


class Predictor(Protocol):
    """Predicts block orders: a `Pilot`, or a user's own class."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The blocks that its predictions index."""

    def predict(self, sample: InputFeatures) -> Any:
        """Return an object whose ``blocks`` is the predicted order, as indices."""

    def check(self, fingerprint: str) -> None:
        """Raise `PilotError` if it was made for another network."""


class Forecast:
    """Predicts and records the order of blocks of each sample.

    Args:
        model: the root.
        policy: ``"pilot"``, ``"repeat"`` or ``"on-demand"``.
        pilot: a trained predictor; ``"auto"``: learn one; None: repeat the last order.
        features: the user's featurizer, or None.
        probes: the user's routing probes, or None.

    Attributes:
        vocabulary: the blocks that orders index; the pilot's, else one block per unit.
        predicted: the predicted order in use for the sample, or None.
        actual: the order that ran.
        accuracy: of `predicted` against `actual`; NaN without a prediction.
        source: of the prediction in use: ``"the pilot"`` or ``"the last order"``.
        asks: whether a routing probe is running; its module calls are not part of the forward.
        listed: fused layer -> the experts that its latest call listed in its arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        pilot: Predictor | str | None,
        features: Features | None,
        probes: Sequence[RoutingProbe] | None = None,
    ) -> None:
        self._model, self._features = model, features
        self.probing = Probing(model, probes)
        self._network = fingerprint(model)
        self.vocabulary = Vocabulary(self._network, ())
        self._predictor: Predictor | None = None
        self._pilot: Pilot | None = None
        self._auto = policy == "pilot" and pilot == "auto"
        self._asks = policy == "pilot"
        self.host_time = HostTime()
        self._opened = perf_counter()
        if policy == "pilot" and pilot is not None and not isinstance(pilot, str):
            pilot.check(self._network)
            self.vocabulary = pilot.vocabulary
            if isinstance(pilot, Pilot):
                self._pilot = deepcopy(pilot)
            else:
                self._predictor, self._asks = pilot, False
        self._repeats = policy != "on-demand"
        self._units: dict[str, Unit] = {}
        self._prediction: list[int] | None = None  # by the pilot, for the running step
        self._spent = 0.0  # on prediction, as the running forward begins
        self._standing = Standing()
        self._silence = Silence()
        self._sample: InputFeatures | None = None
        self._inside: list[str] = []  # paths of running calls of blocks of several units
        self._step: Step | None = None  # while a forward runs
        self._begun = 0  # samples begun
        self._foreseen = 0.0  # moving average of the share of blocks expected right before they ran
        self._hinted: set[int] = set()  # blocks that routing probes are about
        self._again = 1.0  # moving average of the share of these that ran again
        self.asks = False
        self.listed: dict[str, list[int]] = {}
        self._order: list[int] = []
        self._last: list[int] | None = None
        self.predicted: list[int] | None = None
        self.actual: list[int] = []
        self.accuracy = math.nan
        self.source = _LAST
        self._trials = {source: Trial(source) for source in (_PILOT, _LAST)}
        self._on_demand = math.nan  # stalled seconds per second of work of steps on demand
        self._watching = contextlib.ExitStack()

    def watch(
        self,
        units: Sequence[Unit],
        *,
        on_ask: Callable[[Sequence[Unit]], None] = lambda units: None,
        on_revise: Callable[[Sequence[Unit]], None] = lambda rest: None,
    ) -> None:
        """Install hooks that record what runs.

        Args:
            units: the migrator's units.
            on_ask: called with the units that a routing probe may read, before it runs.
            on_revise: called with the units predicted for the rest of a forward, when this
                prediction has changed.
        """
        self._on_ask, self._on_revise = on_ask, on_revise
        self._units = {path: unit for unit in units for path in (*unit.members, unit.path)}
        if not self.vocabulary.blocks:
            self.vocabulary = vocabulary_of(self._network, units)
        if self._auto and self._pilot is None and self.vocabulary.blocks:
            self._pilot = Pilot(self.vocabulary)
        self._install()
        if self._opened:
            self.host_time.end(min(OPENING_S, perf_counter() - self._opened))
            self._opened = 0.0

    def unwatch(self) -> None:
        """Remove the hooks until `watch` is called again."""
        self._watching.close()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Unit] | None:
        """Begin a sample; return the predicted order of its units, or None."""
        self._order, self._inside, self._sample = [], [], None
        self.host_time.begin()
        self._prediction = None
        following: StepTracker | None = None
        self.predicted, self.source = self._last if self._repeats else None, _LAST
        blocks: list[int] = []
        confidence = None
        time, prediction = self.host_time, None
        if self._may_predict():
            with time.of("predict"):
                prediction = self._predict(args, kwargs)
                self._prediction = None if prediction is None else list(prediction.blocks)
        elif self._pilot is not None and self._last is not None and self._asks_routers():
            with time.of("follow"):
                prediction = self._pilot.glance(self._last)
        if prediction is not None:
            blocks, confidence = list(prediction.blocks), getattr(prediction, "confidence", None)
            if self._may_steer():
                self.predicted, self.source = blocks, _PILOT
            elif self._begun % _TRACK_EVERY:
                blocks = []  # else the unused pilot is tracked, to measure its accuracy
            prefetch = blocks and self._trials[_PILOT].prefetch
            learning = ("observe", "judge") if self._prediction is not None else ()
            if prefetch and self._pilot is not None and time.affords("followed", *learning):
                following = self._pilot.tracker
        self._begun += 1
        chosen = self.predicted
        if chosen is not None and self.source == _PILOT:
            chosen = likely(chosen, confidence)
        self._step = Step(following, blocks, chosen or ())
        self._spent = self.host_time.spent_s
        return None if chosen is None else self._units_of(chosen)

    def _may_predict(self) -> bool:
        """Return whether there is a predictor, and the time to ask it and to learn."""
        if self._pilot is None:
            return self._predictor is not None
        # Routers are worth more than a prediction without them.
        asks = ("followed",) if self._asks_routers() else ()
        whole = self.host_time.affords("predict", "observe", "judge", *asks)
        return whole and not self._silence.holds

    def _predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._sample = describe_input(self._model, args, kwargs, self._features)
        self._compare(self._sample)
        if self._pilot is None:
            assert self._predictor is not None
            return self._predictor.predict(self._sample)
        try:
            return self._pilot.predict(self._sample)
        except Exception:
            self._give_up("predict")
            return None

    @contextlib.contextmanager
    def _following(self, kind: str) -> Iterator[None]:
        """Count the body as work of a kind; if the tracker fails in it, follow no more."""
        try:
            with self.host_time.of(kind):
                yield
        except Exception:
            self._step = Step(None, ())
            self._give_up("follow")

    def _give_up(self, what: str) -> None:
        """Go on without the pilot, which failed by the error that is handled."""
        self._pilot, self._auto = None, False
        logger.exception("the pilot cannot %s these steps and is asked no more", what)

    def _asks_routers(self) -> bool:
        """Return whether routing probes can correct what is expected in this step."""
        asks = bool(self._hinted) and self._trials[_PILOT].prefetch and not self._silence.holds
        return asks and self.host_time.affords("followed")

    def _compare(self, sample: InputFeatures) -> None:
        """At the first sample, warn if its features differ from the pilot's training samples."""
        if self._begun or self._pilot is None:
            return
        unlike = self._pilot.unlike(sample)
        if unlike:
            logger.warning(
                "the pilot was trained on samples that show something else (%s): give offload() "
                "the featurizer that its traces were made with, config={'features': ...}",
                unlike,
            )

    def _may_steer(self) -> bool:
        if self._pilot is None or self._standing.steps < _MIN_STEPS:
            return True  # the user's own predictor, or the first steps
        return max(self._standing.pilot, self._foreseen) >= self._standing.last_order

    def visit(self, unit: Unit) -> None:
        """Record a use of slices of a module whose call did not list them."""
        if split_path(unit.path)[0] not in self.listed:
            self._run_experts([unit.path])

    def _run_experts(self, paths: Sequence[str]) -> None:
        if not self._inside:
            self._ran([b for path in paths if (b := self.vocabulary.index_of(path)) >= 0])

    def _ran(self, blocks: list[int]) -> None:
        """Record that these blocks run now; blocks outside a sample's forward are ignored."""
        if self._step is None or self.asks:
            return
        self._order += blocks
        if self._step.follows:
            with self._following("follow"):
                self._step.ran(blocks)
            self._revise(blocks)

    @unseen
    def _ask(
        self,
        probes: Sequence[RoutingProbe],
        read: Sequence[Unit],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        """Run the ``probes`` of a module that is called, and pass their hints to the step."""
        step = self._step
        if step is None or self.asks or not step.follows:
            return
        if not self.host_time.affords("ask", "choose"):
            step.lapsed = True
            return
        self._on_ask(read)  # which the forward would do soon, so it is no cost of prediction
        with self.host_time.of("ask"):
            self.asks = True
            try:
                hints = hinted({probes[0].path: probes}, probes[0].path, args, 0)
            finally:
                self.asks = False
        with self._following("follow"):
            for hint in hints:
                step.hinted(placed_hint(self.vocabulary, hint, len(self._order)))
        if not slices_in(module):  # else the call lists its experts next, and is planned with them
            self._revise([])

    def _revise(self, begun: list[int]) -> None:
        """Replan the rest of the forward if its prediction changed; ``begun`` runs first."""
        step, time, chosen = self._step, self.host_time, None
        assert step is not None
        if not step.diverged:
            return
        if not time.affords("choose"):
            step.lapsed = True
            return
        with self._following("choose"):
            chosen = step.choose(self._order)
        if chosen is not None and self.source == _PILOT and time.affords_plan:
            step.plan(chosen, self._order)
            with time.of("plan"):
                self._on_revise(self._units_of([*begun, *chosen]))

    def drop(self) -> None:
        """End the running forward, if any, as incomplete."""
        if self._step is not None:
            self.end(whole=False)

    def end(self, *, whole: bool = True) -> None:
        """End the sample's forward: learn from what ran, unless an error ended it."""
        self.actual, self._order = self._order, []
        step, self._step = self._step, None
        self.accuracy = math.nan
        self.host_time.pause()
        if not whole:
            return
        share = None  # of the blocks that were expected right before they ran
        if step is not None and step.follows and self.actual and not step.lapsed:
            self.host_time.note("followed", self.host_time.spent_s - self._spent)
            share = self._share(step)
            rate = AVERAGE if self._foreseen else 1.0
            self._foreseen += rate * (share - self._foreseen)
        if before := self._hinted.intersection(self._last or ()):
            again = len(before.intersection(self.actual)) / len(before)
            self._again += AVERAGE * (again - self._again)
        if self.predicted is not None:
            self.accuracy = block_order_accuracy(self.predicted, self.actual)
        if self._last is not None and self._pilot is not None:
            self._judge(share, self._last)
        if self._pilot is not None and self._prediction is not None and self._sample is not None:
            self._learn(self._pilot, self._sample)
        self._last = self.actual

    def _judge(self, share: float | None, last_order: list[int]) -> None:
        """Compare what was predicted, before the step and within it, with the last order.

        Args:
            share: of the blocks that were expected right before they ran; None if unknown.
            last_order: the order that the step before ran.
        """
        last = self._accuracy_of(last_order)
        found = [] if share is None else [share]
        if self._prediction is not None:
            with self.host_time.of("judge"):
                found.append(self._accuracy_of(self._prediction))
                self._standing.observe(found[-1], last)
        if self._silence.observe(max(found) - last if found else None, last):
            logger.info(
                "no prediction is better than repeating the last order, which is %.0f%% right: the "
                "pilot and the routers are asked no more, until that changes",
                100 * last,
            )

    def _share(self, step: Step) -> float:
        """Return the share of the blocks that were expected right before they ran; of those that
        were predicted, if these are more."""
        return step.foreseen / max(1, len(self.actual), len(self.predicted or ()))

    def _accuracy_of(self, order: list[int]) -> float:
        """Return the accuracy of an order, which is known of the one in use."""
        return (
            self.accuracy if order is self.predicted else block_order_accuracy(order, self.actual)
        )

    def _learn(self, pilot: Pilot, sample: InputFeatures) -> None:
        """Let the pilot learn from the step that ran; if it cannot, go on without it."""
        time = self.host_time
        try:
            with time.of("observe"):
                pilot.observe(sample, self.actual)
            if pilot.due and time.affords("consolidate"):
                with time.of("consolidate"):
                    pilot.consolidate()
        except Exception:
            self._give_up("learn from")

    @property
    def pays(self) -> bool:
        """Whether to prefetch by the prediction in use; see `Trial`."""
        return self._repeats and self._trials[self.source].prefetch

    def doubts(self, unit: Unit) -> bool:
        """Return whether a unit that ran is too unlikely to run in the next step for a prefetch."""
        return self._again < LEAST and self.vocabulary.index_of(unit.path) in self._hinted

    def judge(self, step: StepStats) -> None:
        """Pass a step's statistics to the trial of the source that predicted it."""
        self.host_time.end(step.seconds)
        trials = self._trials
        if self._repeats and not step.step:
            self._on_demand = stall_ratio([step])  # nearly all of it is
        elif self._repeats:
            self._on_demand = trials[self.source].observe(step, self._on_demand)

    def names(self, blocks: Sequence[int] | None) -> tuple[str, ...] | None:
        """Return the names of ``blocks`` as reports show them."""
        known = self.vocabulary.blocks
        names = (known[b].name if 0 <= b < len(known) else "(unseen)" for b in blocks or ())
        return None if blocks is None else tuple(names)

    def _units_of(self, blocks: Sequence[int]) -> list[Unit]:
        known, units = self.vocabulary.blocks, self._units
        paths = (path for b in blocks if 0 <= b < len(known) for path in known[b].visits)
        found: list[Unit] = []
        module: Unit | None = None  # the last that is no expert
        within: set[str] = set()  # members of the last that were found
        for path in paths:
            site, part = split_path(path)
            if found and path in found[-1].members and path not in within:
                within.add(path)
                continue
            within = {path}
            whole = None if part is None else units.get(site)  # what is not paged by slices
            if whole is not None and whole is not module:
                found.append(whole)
                module = whole
            if (unit := units.get(path)) is not None:
                found.append(unit)
                module = unit if part is None else module
        return found

    def _install(self) -> None:
        modules, self._unseen = dict(self._model.named_modules()), choosing(self._model)
        blocks = self.vocabulary.blocks
        nesting = {block.path for block in blocks if block.visits != (block.path,)}
        for path in dict.fromkeys(block.path for block in blocks):
            module, nests = modules.get(path), path in nesting
            if module is not None:
                self._before(module, partial(self._enter, path, nests))
                if nests:
                    out = Hook(partial(self._out, path))  # stays active: closes entered calls
                    self._watching.callback(after_call(module, out, self._unseen).remove)
        self._hinted.clear()
        for path, probes, read in self.probing.places(self._units) if self._asks else ():
            self._before(modules[path], partial(self._ask, probes, read))
            for block in {one for probe in probes for one in probe.blocks}:
                self._hinted.update(self.vocabulary.within(block))
        for path, module in modules.items():
            if slices_in(module):
                self._before(module, partial(self._enter_experts, path))

    def _before(self, module: nn.Module, call: Callable[..., None]) -> None:
        hook = Hook(call)
        self._watching.callback(before_call(module, hook, self._unseen).remove)
        self._watching.callback(hook.end)

    def _enter(
        self, path: str, nests: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._inside:
            repeated = path in self.vocabulary.repeated
            index = self.vocabulary.index_of(path, shape_key(args, kwargs) if repeated else "")
            self._ran([index if index >= 0 else UNSEEN])
        if nests:
            self._inside.append(path)

    @unseen
    def _enter_experts(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the experts that a call of a fused layer will run, before any of them does."""
        self.listed.pop(path, None)
        runs = self._step or in_backward()
        if runs and not self.asks and (hit := experts_hit(layer, args, kwargs)) is not None:
            self.listed[path] = hit
            self._run_experts([unit_path(path, number) for number in hit])

    def _out(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """End a call of a block of several units. Its beginning was not recorded if an earlier hook
        failed or replaced the hooks."""
        if path in self._inside:
            while self._inside.pop() != path:
                pass
