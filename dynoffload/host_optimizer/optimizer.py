"""The optimizer whose masters and moments are on the host: the user's surface.

[Note: delayed]  ZeRO-Offload's one-step delayed parameter update (ATC 2021, section 5.2): a step's
update is made beside the next step's forward and backward, which see parameters that lack it. The
parameters take it over at the end of that next step.

[Note: written by others]  What others write into a parameter, such as a model's
``load_state_dict``, goes into the master at the next step: each element that is not what its master
rounds to. Those that are keep their master, so weights and masters may be loaded in any order.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer.checks import check_not_reduced, check_options, check_parameters
from dynoffload.host_optimizer.link import Link, open_link
from dynoffload.host_optimizer.parameter_registry import GradientHooks
from dynoffload.host_optimizer.state_loading import check_state, saved_entries, take_over
from dynoffload.host_optimizer.states import ParameterState, named_parameters
from dynoffload.host_optimizer.storage import HostStorage
from dynoffload.host_optimizer.update_rule import Group, UpdateRule
from dynoffload.host_optimizer.update_runner import (
    StepUpdate,
    UpdateRunner,
    default_threads,
    groups_of,
    open_workers,
    take_writes,
)
from dynoffload.launch import launched_rank
from dynoffload.units import MiB, parse_bytes

logger = logging.getLogger(__name__)


class HostOptimizer(Optimizer):
    """Adam, AdamW or SGD with masters and moments in single precision on the host.

    A step is ``master.grad = p.grad.float(); inner.step(); p.copy_(master); p.grad = None`` for
    each parameter ``p``, bit for bit, with torch's own fused optimizer over the masters.

    **Gradients leave as backward makes them: ``p.grad`` is None after it.** So what looks at it
    sees nothing and changes nothing. Clip by this optimizer's `clip_grad_norm_`, scale by
    `dynoffload.host_optimizer.GradScaler`, and discard a batch by this optimizer's `zero_grad`:
    ``model.zero_grad()`` does not reach gradients that have left.

    The optimizer that was made last over a parameter takes its gradients: another's `step`, of this
    type or of torch's, is refused until this one is closed.

    It has not run on a GPU. It is for one process: under `DistributedDataParallel` gradients would
    leave before they are reduced, and the first step is refused.

    Args:
        params: as torch's optimizers take them; bfloat16, float16 or float32, on one device.
        kind: `torch.optim.Adam`, `torch.optim.AdamW` or `torch.optim.SGD`.
        tile_bytes: of the masters that are updated and uploaded at one time; fewer take less memory
            beside a file.
        delayed: make each update beside the next step, whose forward and backward lack it, and let
            parameters take it over at that step's end. It changes what is trained.
        warmup_steps: that are not delayed, at the beginning.
        threads: that update; None: one for each core that the process may use, divided by the
            processes that torchrun has started here.
        spill_dir: a directory on a disk, for masters and moments; None: they are in host memory.
        host_budget: bytes, or a text such as ``"8GiB"``, of host memory for them before the rest
            goes to ``spill_dir``; None: all goes there.
        device: the accelerator, where parameters are on the CPU still, as a session brings them
            there; None: where they are.
        queues: of the accelerator; None: torch's streams, or the CPU's own.
        options: of ``kind``, such as ``lr``.

    Attributes:
        threads: that update.

    Raises:
        ConfigError: an option is wrong, ``kind`` is not served, or a parameter is not.
        BudgetError: the host has no such memory.
        SpillError: the directory cannot be used.
        BackendError: torch has no such ``device``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        kind: type[Optimizer],
        *,
        tile_bytes: int | str = 8 * MiB,
        delayed: bool = False,
        warmup_steps: int = 0,
        threads: int | None = None,
        spill_dir: str | Path | None = None,
        host_budget: int | str | None = None,
        device: torch.device | str | None = None,
        queues: Link | None = None,
        **options: Any,
    ) -> None:
        self._rule = UpdateRule(kind, options)
        size = parse_bytes(tile_bytes, "tile_bytes")
        check_options(size, threads, delayed, warmup_steps, spill_dir, host_budget)
        self._storage: HostStorage | None = None
        self._states: dict[torch.Tensor, ParameterState] = {}
        self._by_scaler = self._closed = False
        self._loaded = False  # parameters may lag without an update that is under way
        super().__init__(params, self._rule.defaults)
        self._coming = device is not None
        if queues is None:
            queues = open_link((p for g in self.param_groups for p in g["params"]), device)
        self.threads = default_threads() if threads is None else threads
        workers = open_workers(queues.device, self.threads)
        storage = self._storage = HostStorage(
            queues,
            workers,
            tile_bytes=size,
            spill_dir=None if spill_dir is None else Path(spill_dir),
            host_budget=0 if host_budget is None else parse_bytes(host_budget, "host_budget"),
            banks=2 if delayed else 1,
        )
        self._hooks = GradientHooks(self, self._states, storage.gradients)
        self._runner = UpdateRunner(
            self._rule, workers, storage, undelayed=warmup_steps if delayed else None
        )
        self._finalizer = weakref.finalize(self, storage.close)
        try:
            self._take_in(self.param_groups)
        except BaseException:
            self.close()
            raise
        if not launched_rank():
            logger.info(
                "HostOptimizer: %s of %.1f million elements on %s, %s; updates by %d threads%s",
                self.kind,
                sum(state.numel for state in self._states.values()) / 1e6,
                queues.name,
                storage.describe(),
                self.threads,
                f", delayed after {warmup_steps} steps" if delayed else "",
            )

    @property
    def kind(self) -> str:
        """Name of torch's optimizer that makes the updates."""
        return self._rule.kind.__name__

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as with torch's optimizers; of the same device as the others.

        Raises:
            ConfigError: one of them is not served; nothing was added.
        """
        super().add_param_group(param_group)
        if self._storage is None:
            return
        try:
            self._take_in(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def _take_in(self, groups: Sequence[Group]) -> None:
        """Give the parameters of ``groups`` their places, and take their gradients from now on."""
        self.settle()  # larger tiles need other slots than a delayed update passes through
        storage = self._usable()
        states = [
            ParameterState(name, parameter, self._rule.moments(group))
            for number, group in enumerate(groups, len(self.param_groups) - len(groups))
            for name, parameter in named_parameters(number, group)
        ]
        check_parameters(states, storage.link.device, coming=self._coming)
        storage.add(states)
        self._may_be_reduced = True
        for state in states:
            self._states[state.parameter] = state
            self.state[state.parameter] = state.shown()
            self._hooks.add(state)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that have left; or make them zero."""
        super().zero_grad(set_to_none)
        if self._storage is not None and not self._closed:
            self._storage.gradients.zero(set_to_none=set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their common norm, before ``step()``.

        The bits are those of `torch.nn.utils.clip_grad_norm_` with ``foreach=False``; after a
        `GradScaler` has unscaled, of that on float32 gradients. They are multiplied in the step.

        Args:
            max_norm: of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is no finite number.

        Returns:
            The norm before, of no dimension.

        Raises:
            RuntimeError: the norm is not finite, and was to be.
        """
        self._hooks.send_remaining()
        states = [self._states[p] for group in self.param_groups for p in group["params"]]
        return self._usable().gradients.clip(
            states, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    @torch.no_grad()
    def unscale(self, inverse: torch.Tensor) -> bool:
        """Have the next step read gradients times ``inverse``, the inverse of the loss scale.

        Returns:
            Whether all gradients are finite.
        """
        self._hooks.send_remaining()
        return self._usable().gradients.unscale(inverse)

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """Let this package's `GradScaler` step, or leave a step out, in this block."""
        self._by_scaler = True
        try:
            yield
        finally:
            self._by_scaler = False
            self.zero_grad()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler` asks before a step."""
        if self._by_scaler:
            return False
        raise ConfigError(
            "torch.amp.GradScaler finds no gradients to unscale, as HostOptimizer has taken them: "
            "use dynoffload.host_optimizer.GradScaler in its place"
        )

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; see [Note: delayed].

        Args:
            closure: computes the loss anew and returns it, called once.

        Raises:
            StepLostError: it was cut off, as by a file that cannot be read: some parameters have it
                and others not, until a state is loaded.
            ConfigError: an option was switched on that needs state which there is none of; another
                optimizer of this type was made over a parameter since; or its gradients are those
                of a `DistributedDataParallel` of several processes.
        """
        self._usable()
        self._hooks.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.inference_mode(False), torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        storage = self._usable()
        if self._may_be_reduced:
            check_not_reduced(self._states)
            self._may_be_reduced = False
        self._hooks.send_remaining()
        groups = groups_of(self._rule, self.param_groups, self._states, storage.gradients.gradients)
        self.finish()
        take_writes(groups, storage)
        tiles = [tile for tile in storage.tiles if any(p.state in groups for p in tile.pieces)]
        gradients, transform = storage.gradients.take()
        self._runner.run(StepUpdate(groups, gradients, transform, tiles))

    @torch.no_grad()
    def finish(self) -> None:
        """Make a delayed update that is under way, and let parameters take it over now.

        For the end of training, and before parameters are evaluated or exported.

        Raises:
            StepLostError: it was cut off.
        """
        self.settle()
        self._runner.end()
        if self._loaded:
            for state in self._states.values():
                state.catch_up()
            self._loaded = False

    def settle(self) -> None:
        """Wait until masters and moments are those of all steps; parameters may lag.

        Raises:
            StepLostError: a step was cut off.
        """
        self._usable()
        self._runner.wait()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state: for each parameter ``step``, ``master``, moments and ``lags``, whether
        the parameter is still to take its master over.

        As with torch's, tensors are those that steps go on to change; of a file, they are mapped
        from it.

        Raises:
            StepLostError: a step was cut off.
        """
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned, whatever its tiles and files; or the state of the
        torch optimizer itself, to which the parameters' own values are the masters.

        Hooks see the state without tensors, as those are read into their places.

        Raises:
            ConfigError: it is of other parameters, or lacks something; nothing was changed.
            SpillError: it cannot be written to the file.
        """
        self._check_open()
        check_state(state_dict, self.param_groups, self._states, self._rule.defaults)
        self.begin_load()
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(saved_entries(state_dict, self.param_groups, self._states))
        self.end_load()

    def begin_load(self) -> None:
        """The state is about to be loaded: what is under way ends first, well or not."""
        self._check_open()
        self._runner.drop()

    def end_load(self) -> None:
        """The state was loaded, tensor by tensor, into what ``state`` shows, or in its place."""
        take_over(self.state, self._states.values())
        assert self._storage is not None
        self._storage.sync()
        self._loaded = True
        self.zero_grad()
        steps = max((float(state.step) for state in self._states.values()), default=0.0)
        self._runner.restart(int(steps))

    # The end

    def close(self) -> None:
        """Make what is under way, let go of parameters, and give memory and files back.

        Raises:
            StepLostError: a delayed update was cut off; all else was done.
        """
        if self._closed:
            return
        try:
            if self._runner.lost is None:
                self.finish()
        finally:
            self._closed = True
            self._hooks.close()
            self.state.clear()
            self._finalizer()

    def __enter__(self) -> HostOptimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a HostOptimizer is not copied or pickled: save its state_dict(), and make another one"
        )

    def _usable(self) -> HostStorage:
        """Return what is held, if a step can go on from it."""
        self._check_open()
        self._runner.check()
        assert self._storage is not None
        return self._storage

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this HostOptimizer is closed: make another one")
