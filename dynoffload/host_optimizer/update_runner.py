"""Makes the updates of a step, tile by tile: ZeRO-Offload's half of it (ATC 2021, section 4).

The workers read gradients, run torch's fused kernel over the masters, and round these to the
parameters' dtype. The calling thread uploads what is finished.

[Note: where uploads wait]  A new value is rounded into the pinned memory that the parameter's
gradient came in, as large and no longer needed. So uploads need no buffers, and those of a delayed
update wait there for the end of the next step. The next gradient is copied there after a moment of
the compute queue that comes after the upload.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.errors import ConfigError, StepLostError
from dynoffload.host_optimizer.gradient_offload import HostGradient
from dynoffload.host_optimizer.gradient_transform import GradientTransform
from dynoffload.host_optimizer.staging import StagedTile
from dynoffload.host_optimizer.state_buffers import MASTER, ParameterState, flat
from dynoffload.host_optimizer.storage import HostStorage
from dynoffload.host_optimizer.tiles import Tile
from dynoffload.host_optimizer.update_rule import Group, Slice, UpdateRule
from dynoffload.host_optimizer.worker_pool import WorkerPool

_COMPARED = 1 << 20  # elements at one time


@dataclass(frozen=True)
class StepUpdate:
    """The updates of one step.

    Attributes:
        groups: hyperparameters of each parameter that is updated, as they were at ``step()``.
        gradients: of these parameters.
        transform: of the gradients.
        tiles: those that hold any of these parameters, in their order.
    """

    groups: Mapping[ParameterState, Group]
    gradients: Mapping[ParameterState, HostGradient]
    transform: GradientTransform
    tiles: Sequence[Tile]

    def upload(self, tile: Tile) -> None:
        """Give parameters their new values, on the compute queue.

        Operators of the calling thread do that. They come after all that reads the old values and
        before all that reads the new ones, and in a session bring what is absent.
        """
        for state, begin, end in tile.pieces:
            gradient = self.gradients.get(state)
            if gradient is not None:
                target: Any = flat(state.parameter)[begin:end]
                target.copy_(gradient.memory[begin:end], non_blocking=True)

    def mark_uploaded(self) -> None:
        """All tiles were uploaded."""
        for state in self.groups:
            state.mark_updated()


class UpdateRunner:
    """Makes updates in the order in which they are asked for.

    Args:
        rule: the optimizer's code.
        workers: that run it.
        storage: of masters and moments.
        undelayed: steps at the beginning that are not delayed; None: none is.

    Attributes:
        lost: what a step was cut off by; None after a state was loaded.
    """

    def __init__(
        self, rule: UpdateRule, workers: WorkerPool, storage: HostStorage, *, undelayed: int | None
    ) -> None:
        self._rule, self._workers, self._storage = rule, workers, storage
        self._undelayed, self._steps = undelayed, 0
        self.lost: BaseException | None = None
        self._scratch = torch.empty(0)
        self._pending: tuple[StepUpdate, Future[None]] | None = None

    def run(self, update: StepUpdate) -> None:
        """Make a step's updates, or begin delayed ones; those of the step before have ended.

        Raises:
            StepLostError: some updates were made, and others not.
            KeyboardInterrupt: Ctrl-C came meanwhile; the step was made.
        """
        self._steps += 1
        if self._undelayed is not None and self._steps > self._undelayed:
            for state in update.groups:
                state.lags.fill_(True)
            self._pending = update, self._begin(update, lambda tile: None)
            return
        with self._losing():
            interrupt = self._run(update)
        self._storage.gradients.settle()  # all have been copied: lets go of them
        if interrupt is not None:
            raise interrupt

    def _run(self, update: StepUpdate) -> KeyboardInterrupt | None:
        """Make updates and upload them; all uploads are queued when it returns."""
        finished: queue.SimpleQueue[Tile | None] = queue.SimpleQueue()
        made = self._begin(update, finished.put)
        interrupt = None
        try:
            while (tile := finished.get()) is not None:
                update.upload(tile)
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            wait([made])  # the workers must not run on while an error is raised
        made.result()
        if interrupt is not None:
            for tile in update.tiles:  # also those that were uploaded: it does no harm
                update.upload(tile)
        update.mark_uploaded()
        return interrupt

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """A step that is cut off in this block is lost."""
        try:
            yield
        except BaseException as error:
            self.lost = error
            raise StepLostError(
                f"a step of HostOptimizer was cut off ({error}): some masters have it and others "
                "do not; go on from the last checkpoint, with load_state_dict()"
            ) from error

    def check(self) -> None:
        """Refuse to go on from a step that was lost.

        Raises:
            StepLostError: one was.
        """
        if self.lost is not None:
            raise StepLostError(
                f"a step of HostOptimizer was cut off before ({self.lost}): go on from the last "
                "checkpoint, with load_state_dict()"
            ) from self.lost

    def restart(self, steps: int) -> None:
        """Go on from a state that was loaded, after so many steps."""
        self.lost, self._steps = None, steps

    def wait_delayed(self) -> None:
        """Hold the calling thread until a delayed update is made.

        Raises:
            StepLostError: it was cut off.
        """
        if self._pending is not None:
            wait([self._pending[1]])  # Ctrl-C leaves it to the next call
            with self._losing():
                self._pending[1].result()

    def end_delayed(self) -> None:
        """Upload a delayed update that was made well. Cut off, it may be called again."""
        if self._pending is not None:
            update, _ = self._pending
            for tile in update.tiles:
                update.upload(tile)
            update.mark_uploaded()
            self._pending = None

    def drop_delayed(self) -> None:
        """Wait for a delayed update, and forget it, however it went."""
        if self._pending is not None:
            wait([self._pending[1]])
        self._pending = None

    def _begin(self, update: StepUpdate, on_tile: Callable[[Tile | None], None]) -> Future[None]:
        """Begin updates beside the calling thread.

        Args:
            update: the updates.
            on_tile: called with each tile that is finished, and with None at the end, also of an
                update that fails.
        """
        # What was computed on the caller's stream is read there, and not by another thread.
        return self._workers.submit(self._make, update, update.transform.to_host(), on_tile)

    def _make(
        self,
        update: StepUpdate,
        transform: GradientTransform,
        on_tile: Callable[[Tile | None], None],
    ) -> None:
        try:
            with torch.no_grad():
                with contextlib.closing(self._storage.staging.stage(update.tiles)) as staged:
                    for one in staged:
                        self._update(one, update, transform)
                        on_tile(one.tile)
                for state in update.groups:
                    state.step += 1
        finally:
            on_tile(None)

    def _update(self, staged: StagedTile, update: StepUpdate, transform: GradientTransform) -> None:
        needed = sum(end - begin for _, begin, end in staged.tile.pieces)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        slices: list[Slice] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        taken = 0
        for (state, begin, end), tensors in staged.pieces:
            group = update.groups.get(state)
            if group is None:
                continue
            arriving = update.gradients[state]
            arriving.wait()
            gradient = arriving.memory[begin:end]
            wide = transform.read(gradient, self._scratch[taken:])
            taken += end - begin
            master = tensors.pop(MASTER)
            slices.append(Slice(master, wide, tensors, float(state.step), group))
            results.append((gradient, master))
        self._rule.run(slices)
        for gradient, master in results:  # see [Note: where uploads wait]
            gradient.copy_(master)


def groups_of(
    rule: UpdateRule,
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[torch.Tensor, ParameterState],
    gradients: Container[ParameterState],
) -> dict[ParameterState, Group]:
    """Return the hyperparameters, as they are now, of each parameter that has a gradient.

    Raises:
        ConfigError: an option needs a moment that is not there.
    """
    found: dict[ParameterState, Group] = {}
    for group in groups:
        values, moments = rule.hyperparameters(group), rule.moments(group)
        for state in (states[parameter] for parameter in group["params"]):
            if state not in gradients:
                continue
            if lacking := [key for key in moments if key not in state.moments]:
                raise ConfigError(
                    f"{state.name} has no {lacking[0]}, as its group was made without: make the "
                    "optimizer with that option, and load its state"
                )
            found[state] = values
    return found


def take_writes(states: Iterable[ParameterState], storage: HostStorage) -> None:
    """Let masters take over what others have written into parameters: each element that is not what
    its master rounds to."""
    changed = [s for s in states if s.parameter._version != s.version and not s.lags]
    for state in changed:
        masters, values = state.flat(MASTER), flat(state.parameter)
        for begin in range(0, state.numel, _COMPARED):
            master = masters[begin : begin + _COMPARED]
            value = values[begin : begin + _COMPARED].to("cpu")
            bits = torch.int32 if value.dtype == torch.float32 else torch.int16
            same = master.to(value.dtype).view(bits) == value.view(bits)
            if not bool(same.all()):
                master.copy_(torch.where(same, master, value.float()))
        state.version = state.parameter._version
    if changed:
        storage.sync()


def catch_up(states: Iterable[ParameterState]) -> None:
    """Let parameters take over masters that they lag behind."""
    for state in states:
        if state.lags:
            flat(state.parameter).copy_(state.flat(MASTER))
            state.mark_updated()
