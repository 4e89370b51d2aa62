"""Runs the updates of a step tile by tile, as in ZeRO-Offload (ATC 2021, section 4).

A worker reads gradients, runs torch's fused kernel on the masters, and rounds these to the
parameters' dtype. The calling thread uploads finished tiles.

[Note: where uploads wait]  A new value is rounded into the pinned memory of the parameter's
gradient, which has the same size and is no longer needed. So uploads need no buffers, and those of
a delayed update wait there until the end of the next step. The next gradient is copied there only
after a compute-queue event that follows the upload.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from dynoffload.errors import ConfigError, StepLostError
from dynoffload.host_optimizer.gradient_offload import GradientTransform, HostGradient
from dynoffload.host_optimizer.states import MASTER, ParameterState, flat
from dynoffload.host_optimizer.storage import HostStorage
from dynoffload.host_optimizer.tiles import Tile, Views
from dynoffload.host_optimizer.update_rule import Group, Slice, UpdateRule
from dynoffload.launch import local_ranks

_COMPARED = 1 << 20  # elements compared at a time


def default_threads() -> int:
    """Return the number of cores that the process may use, divided by the processes that the
    launcher has started on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks())


def open_workers(device: torch.device, threads: int) -> Executor:
    """Return a one-thread executor that updates parameters of ``device``. In that thread alone,
    OpenMP uses ``threads`` threads.
    """

    def begin() -> None:
        if device.index is not None:  # None on a CPU: no accelerator to set
            torch.accelerator.set_device_index(device.index)
        torch.get_num_threads()  # applies the process's thread count, so call it before the limit
        _openmp().limit(limits=threads)

    return ThreadPoolExecutor(1, "dynoffload-update", begin)


@functools.cache
def _openmp() -> Any:
    """Return the controller that sets the calling thread's OpenMP thread count."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="openmp")


@dataclass(frozen=True)
class StepUpdate:
    """The updates of one step.

    Attributes:
        groups: hyperparameters of each updated parameter, as they were at ``step()``.
        gradients: of these parameters.
        transform: applied to the gradients as they are read.
        tiles: those that contain any of these parameters, in order.
        finished: tiles ready for upload; None marks the end, also after an error.
    """

    groups: Mapping[ParameterState, Group]
    gradients: Mapping[ParameterState, HostGradient]
    transform: GradientTransform
    tiles: Sequence[Tile]
    finished: queue.SimpleQueue[Tile | None] = field(default_factory=queue.SimpleQueue)

    def upload(self, tile: Tile) -> None:
        """Copy the new values of a tile to its parameters, on the compute queue.

        The copies run in the calling thread: after its reads of the old values, before those of
        the new. A session sees them, and fetches absent parameters.
        """
        for state, begin, end in tile.pieces:
            gradient = self.gradients.get(state)
            if gradient is not None:
                target: Any = flat(state.parameter)[begin:end]
                target.copy_(gradient.memory[begin:end], non_blocking=True)


class UpdateRunner:
    """Runs updates in the order in which they are submitted.

    Args:
        rule: how to update.
        workers: run it.
        storage: of masters and moments.
        undelayed: number of initial steps that are not delayed; None: no step is delayed.

    Attributes:
        lost: the error that interrupted a step; None after a state was loaded.
    """

    def __init__(
        self, rule: UpdateRule, workers: Executor, storage: HostStorage, *, undelayed: int | None
    ) -> None:
        self._rule, self._workers, self._storage = rule, workers, storage
        self._undelayed, self._steps = undelayed, 0
        self.lost: BaseException | None = None
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._under_way: tuple[StepUpdate, Future[None]] | None = None
        self._uploading = False  # whether some tiles of the current update left the queue

    def run(self, update: StepUpdate) -> None:
        """Run a step's updates, or start delayed ones. Those of the previous step have ended.

        Raises:
            StepLostError: some updates were made, and others not.
            BaseException: an upload was interrupted, as by Ctrl-C, and repeated. The step is made.
        """
        self._steps += 1
        # The transform is read here, as it is computed on this thread's stream.
        made = self._workers.submit(self._make, update, update.transform.to_host())
        self._under_way, self._uploading = (update, made), False
        if self._undelayed is not None and self._steps > self._undelayed:
            for state in update.groups:
                state.lags.fill_(True)
            return
        self.end()
        self._storage.gradients.settle()  # all are on the host: release the originals

    def wait(self) -> None:
        """Block the calling thread until the update in progress is computed.

        Raises:
            StepLostError: it, or an earlier one, was interrupted.
        """
        if self._under_way is not None:
            wait([self._under_way[1]])  # after Ctrl-C the next call waits again
            self.lost = self._under_way[1].exception()
        self.check()

    def end(self) -> None:
        """Upload tiles as they finish, or all of them again after an interrupted upload.

        Raises:
            BaseException: as `run`.
        """
        if self._under_way is None:
            return
        update, _ = self._under_way
        again, self._uploading = self._uploading, True
        cut_off = None
        try:
            while not again and (tile := update.finished.get()) is not None:
                update.upload(tile)
        except BaseException as error:
            cut_off, again = error, True
        self.wait()
        try:
            for tile in update.tiles if again else ():
                update.upload(tile)
        except Exception as error:
            self.lost = error
            self.check()
        for state in update.groups:
            state.mark_updated()
        self._under_way = None
        if cut_off is not None:
            raise cut_off

    def check(self) -> None:
        """Refuse to continue after a lost step.

        Raises:
            StepLostError: a step was lost.
        """
        if self.lost is not None:
            raise StepLostError(
                f"a step of HostOptimizer was cut off ({self.lost}): only some masters were "
                "updated; go on from the last checkpoint, with load_state_dict()"
            ) from self.lost

    def drop(self) -> None:
        """Wait for the update in progress, and discard it, ignoring its errors."""
        if self._under_way is not None:
            wait([self._under_way[1]])
        self._under_way = None

    def restart(self, steps: int) -> None:
        """Continue from a loaded state, after ``steps`` steps."""
        self.lost, self._steps = None, steps

    def _make(self, update: StepUpdate, transform: GradientTransform) -> None:
        try:
            with torch.no_grad():
                with contextlib.closing(self._storage.staging.stage(update.tiles)) as staged:
                    for tile, views in staged:
                        self._update(tile, views, update, transform)
                        update.finished.put(tile)
                for state in update.groups:
                    state.step += 1
        finally:
            update.finished.put(None)

    def _update(
        self, tile: Tile, views: Views, update: StepUpdate, transform: GradientTransform
    ) -> None:
        needed = sum(end - begin for _, begin, end in tile.pieces)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.float32, device="cpu")
        slices: list[Slice] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        taken = 0
        for (state, begin, end), tensors in zip(tile.pieces, views, strict=True):
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
    """Return the current hyperparameters of each parameter that has a gradient.

    Raises:
        ConfigError: an option needs a moment that does not exist.
    """
    found: dict[ParameterState, Group] = {}
    for group in groups:
        values, moments = rule.hyperparameters(group), rule.moments(group)
        for state in (states[parameter] for parameter in group["params"]):
            if state not in gradients:
                continue
            if lacking := [key for key in moments if key not in state.moments]:
                raise ConfigError(
                    f"{state.name} has no {lacking[0]}, as its group was made without that option: "
                    "make the optimizer with it, and load its state"
                )
            found[state] = values
    return found


def take_writes(states: Iterable[ParameterState], storage: HostStorage) -> None:
    """Copy each element of a written parameter that differs from its rounded master into the
    master."""
    changed = [s for s in states if s.parameter._version != s.version and not s.lags]
    for state in changed:
        masters, values = state.tensors[MASTER], flat(state.parameter)
        for master, there in zip(
            *(torch.split(one, _COMPARED) for one in (masters, values)), strict=True
        ):
            value = there.to("cpu")
            bits = torch.int32 if value.dtype == torch.float32 else torch.int16
            same = master.to(value.dtype).view(bits) == value.view(bits)
            if not bool(same.all()):
                master.copy_(torch.where(same, master, value.float()))
        state.version = state.parameter._version
    if changed:
        storage.sync()
