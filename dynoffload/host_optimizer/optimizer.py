"""`HostOptimizer`: an optimizer whose master weights and moments are in host memory or a file.

[Note: delayed]  ZeRO-Offload's one-step delayed parameter update (ATC 2021, section 5.2): a step's
update runs during the next step's forward and backward, which still use the old parameters. The
parameters take it over at the end of that next step.

[Note: written by others]  External writes to a parameter, such as ``load_state_dict``, are copied
to the master at the next step: each element that differs from its rounded master. Other elements
keep their master, so weights and masters may be loaded in any order.
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
from dynoffload.host_optimizer.checks import check_options, check_parameters
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
    each parameter ``p``, bit for bit, with torch's own fused optimizer on the masters.

    **Backward moves gradients to the host: afterwards ``p.grad`` is None.** Code that inspects or
    modifies it has no effect. Clip by this optimizer's `clip_grad_norm_`, scale by
    `dynoffload.host_optimizer.GradScaler`, and discard a batch by this optimizer's `zero_grad`:
    ``model.zero_grad()`` does not reach gradients on the host.

    The optimizer created last for a parameter takes its gradients. The `step` of any other, of this
    type or of torch's, is refused until this one is closed.

    It serves one process: under `DistributedDataParallel` gradients would leave before they are
    reduced, so ``backward()`` raises `ConfigError` before the first does.

    Args:
        params: as torch's optimizers take them; bfloat16, float16 or float32, on one device.
        kind: `torch.optim.Adam`, `torch.optim.AdamW` or `torch.optim.SGD`.
        tile_bytes: of the masters that are updated and uploaded together; with a file, smaller
            tiles need less memory for slots.
        delayed: run each update during the next step, whose forward and backward lack it; the
            parameters take it over at that step's end. It changes what is trained.
        warmup_steps: number of initial steps that are not delayed.
        threads: for updates; None: one for each core that the process may use, divided by the
            processes that torchrun has started on this machine.
        spill_dir: directory on a disk for masters and moments; None: they are in host memory.
        host_budget: bytes, or a text such as ``"8GiB"``, of host memory for them before the rest
            goes to ``spill_dir``; None: all goes there.
        device: the accelerator, if parameters are still on the CPU because a session will fetch
            them; None: the device where they are.
        queues: of the accelerator; None: torch's streams, or the CPU's own.
        options: of ``kind``, such as ``lr``.

    Attributes:
        threads: for updates.

    Raises:
        ConfigError: an option is wrong, or ``kind`` or a parameter is not supported.
        BudgetError: the host has too little memory.
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
        self._in_scaler_step = self._closed = False
        self._loaded = False  # parameters may lag although no update is in progress
        super().__init__(params, self._rule.defaults)
        self._may_be_on_cpu = device is not None
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
            self._add_parameters(self.param_groups)
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
        """Name of the torch optimizer whose update rule is used."""
        return self._rule.kind.__name__

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as with torch's optimizers; on the same device as the others.

        Raises:
            ConfigError: one of them is not supported; nothing was added.
        """
        super().add_param_group(param_group)
        if self._storage is None:
            return
        try:
            self._add_parameters(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def _add_parameters(self, groups: Sequence[Group]) -> None:
        """Allocate memory for the parameters of ``groups``, and take over their gradients."""
        self.settle()  # larger tiles replace the slots that a delayed update uses
        storage = self._checked_storage()
        states = [
            ParameterState(name, parameter, self._rule.moments(group))
            for number, group in enumerate(groups, len(self.param_groups) - len(groups))
            for name, parameter in named_parameters(number, group)
        ]
        check_parameters(states, storage.link.device, coming=self._may_be_on_cpu)
        storage.add(states)
        for state in states:
            self._states[state.parameter] = state
            self.state[state.parameter] = state.shown()
            self._hooks.add(state)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients, also those on the host; or fill them with zeros."""
        super().zero_grad(set_to_none)
        if self._storage is not None and not self._closed:
            self._storage.gradients.zero(set_to_none=set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their common norm, before ``step()``.

        The bits are those of `torch.nn.utils.clip_grad_norm_` with ``foreach=False``; after a
        `GradScaler` has unscaled, those on float32 gradients. The step applies the factor.

        Args:
            max_norm: of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
            ConfigError: gradients belong to a `DistributedDataParallel` of several processes.
        """
        self._hooks.send_remaining()
        states = [self._states[p] for group in self.param_groups for p in group["params"]]
        return self._checked_storage().gradients.clip(
            states, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    @torch.no_grad()
    def unscale(self, inverse: torch.Tensor) -> bool:
        """Multiply gradients by ``inverse``, that of the loss scale, when the next step reads them.

        Returns:
            Whether all gradients are finite.

        Raises:
            ConfigError: gradients belong to a `DistributedDataParallel` of several processes.
        """
        self._hooks.send_remaining()
        return self._checked_storage().gradients.unscale(inverse)

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """Allow this package's `GradScaler` to step, or skip a step, within this block."""
        self._in_scaler_step = True
        try:
            yield
        finally:
            self._in_scaler_step = False
            self.zero_grad()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Queried by `torch.amp.GradScaler` before a step."""
        if self._in_scaler_step:
            return False
        raise ConfigError(
            "torch.amp.GradScaler finds no gradients to unscale, as HostOptimizer has taken them: "
            "use dynoffload.host_optimizer.GradScaler in its place"
        )

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; see [Note: delayed].

        Args:
            closure: computes the loss again and returns it; called once.

        Raises:
            StepLostError: the step was interrupted, as by a read error: some parameters are updated
                and others not, until a state is loaded.
            ConfigError: an option was enabled that needs missing state; another optimizer of this
                type has taken over a parameter; or its gradients belong to a
                `DistributedDataParallel` of several processes.
        """
        self._checked_storage()
        self._hooks.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.inference_mode(False), torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        storage = self._checked_storage()
        self._hooks.send_remaining()
        groups = groups_of(self._rule, self.param_groups, self._states, storage.gradients.gradients)
        self.finish()
        take_writes(groups, storage)
        tiles = [tile for tile in storage.tiles if any(p.state in groups for p in tile.pieces)]
        gradients, transform = storage.gradients.take()
        self._runner.run(StepUpdate(groups, gradients, transform, tiles))

    @torch.no_grad()
    def finish(self) -> None:
        """Complete a delayed update in progress, and let parameters take it over now.

        For the end of training, and before parameters are evaluated or exported.

        Raises:
            StepLostError: it was interrupted.
        """
        self.settle()
        self._runner.end()
        if self._loaded:
            for state in self._states.values():
                state.catch_up()
            self._loaded = False

    def settle(self) -> None:
        """Wait until masters and moments include all steps; parameters may lag.

        Raises:
            StepLostError: a step was interrupted.
        """
        self._checked_storage()
        self._runner.wait()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state: for each parameter ``step``, ``master``, moments and ``lags``, whether
        the parameter has yet to take over its master.

        As in torch, later steps modify these tensors. Those in a file are mapped from it.

        Raises:
            StepLostError: a step was interrupted.
        """
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`, with any tiles and files; or one of the torch
        optimizer itself, in which case the parameters' own values become the masters.

        Hooks see the state without tensors, as those are copied directly. Gradients that left and
        were not used by a step are lost, and a warning says so.

        Raises:
            ConfigError: it is of other parameters, or incomplete; nothing was changed.
            SpillError: it cannot be written to the file.
        """
        self._check_open()
        check_state(state_dict, self.param_groups, self._states, self._rule.defaults)
        self.begin_load()
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(saved_entries(state_dict, self.param_groups, self._states))
        self.end_load()

    def begin_load(self) -> None:
        """Prepare to load a state: wait for an update in progress, ignoring its errors."""
        self._check_open()
        self._runner.drop()

    def end_load(self) -> None:
        """Complete a load: the tensors in ``state`` were filled in place, or replaced."""
        take_over(self.state, self._states.values())
        assert self._storage is not None
        self._storage.sync()
        self._loaded = True
        self._storage.gradients.warn_of_lost("has loaded a state")
        self.zero_grad()
        steps = max((float(state.step) for state in self._states.values()), default=0.0)
        self._runner.restart(int(steps))

    # The end

    def close(self) -> None:
        """Complete a delayed update, release the parameters, and free memory and files.

        Gradients that left and were not used by a step are lost, and a warning says so.

        Raises:
            StepLostError: a delayed update was interrupted; all else was done.
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

    def _checked_storage(self) -> HostStorage:
        """Return the storage, if it is open and no step was lost."""
        self._check_open()
        self._runner.check()
        assert self._storage is not None
        return self._storage

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this HostOptimizer is closed: make another one")
