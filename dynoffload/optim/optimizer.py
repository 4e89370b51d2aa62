"""The optimizer whose masters and moments are on the host: the user's surface.

[Note: semantics]  Each parameter, in half or in single precision, has a master in single precision.
A step reads the gradient as float32, updates the master by the code of torch's own optimizer, and
rounds it into the parameter. Written with torch alone, for one parameter ``p``::

    master.grad = p.grad.float()
    inner.step()            # torch.optim's, fused, over the masters
    p.copy_(master)
    p.grad = None

The bits are those of these lines, on the CPU for ``place="host"`` and on the accelerator for
``place="device"``, whatever the tiles are.

[Note: gradients]  ``step()`` consumes gradients: parameters have none after it. On the host they
have none after backward: each leaves as it is made. Those that have left are forgotten by
``optimizer.zero_grad()``, and not by the model's.

[Note: delayed]  ZeRO-Offload's one-step delayed parameter update (ATC 2021, section 5.2): the
update of a step is made beside the next one's forward and backward, which so see parameters that
lack it, and the parameters take it over at the end of that next step.

[Note: written by others]  What somebody else writes into a parameter, such as a model's
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

from dynoffload.errors import ConfigError, StepLostError
from dynoffload.launch import launched_rank
from dynoffload.memory.accelerator.queues import Queues
from dynoffload.memory.cores import address_of, cores_for
from dynoffload.optim.agreeing import agree, catch_up
from dynoffload.optim.choosing import Plan, measure, plan_by
from dynoffload.optim.claims import Claims
from dynoffload.optim.crew import Crew
from dynoffload.optim.delaying import Delay
from dynoffload.optim.departures import check_gradient
from dynoffload.optim.hosting import Hosting
from dynoffload.optim.immediate import Immediate
from dynoffload.optim.loading import check_state, fill, take_over
from dynoffload.optim.norms import are_finite_in_place, norms_in_place, total_norm
from dynoffload.optim.options import (
    check_delay,
    check_entries,
    check_not_reduced,
    check_options,
    peers_of,
    queues_of,
)
from dynoffload.optim.reading import Reading
from dynoffload.optim.rules import Group, Rule
from dynoffload.optim.shelves import Entry
from dynoffload.optim.stores import Stores
from dynoffload.optim.streaming import Streaming
from dynoffload.optim.work import Work, work_of
from dynoffload.units import MiB, format_bytes, parse_bytes

logger = logging.getLogger(__name__)


class HostOptimizer(Optimizer):
    """Adam, AdamW or SGD with masters and moments in single precision on the host.

    A step is ``master.grad = p.grad.float(); inner.step(); p.copy_(master); p.grad = None`` for
    each parameter ``p``, bit for bit, with torch's own fused optimizer over the masters.

    **Gradients leave as backward makes them: ``p.grad`` is None after it.** So
    `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and whatever else looks at ``p.grad``
    see nothing and change nothing: call `clip_grad_norm_` of this optimizer, and take
    `dynoffload.optim.GradScaler`. To discard a batch call `zero_grad` of this optimizer;
    ``model.zero_grad()`` does not reach gradients that have left.

    The optimizer that was made last over a parameter takes its gradients: another's `step`, of this
    type or of torch's, is refused until this one is closed.

    It has run on CPUs, and on an accelerator made of threads; it has not run on a GPU. It is for
    one process: under `DistributedDataParallel` gradients would leave before they are reduced, and
    the first step is refused.

    Args:
        params: as torch's optimizers take them; bfloat16, float16 or float32, on one device.
        kind: `torch.optim.Adam`, `torch.optim.AdamW` or `torch.optim.SGD`.
        place: where updates are computed: ``"host"``; ``"device"``, through which masters and
            moments are streamed; or ``"auto"``, the one that takes less time by what is measured
            now. The two may differ in the last bit, as their kernels do: name one for runs that are
            to be repeated on other machines.
        tile_bytes: of the masters that are updated, uploaded or streamed at one time.
        delayed: make each update beside the next step, whose forward and backward lack it, and let
            parameters take it over at that step's end. It changes what is trained. On the host
            only.
        warmup_steps: that are not delayed, at the beginning.
        threads: that update on the host; None: one for each core of the accelerator's memory node
            that is this process's share.
        spill_dir: a directory on a disk, for masters and moments; None: they are in host memory.
        host_budget: bytes, or a text such as ``"8GiB"``, of host memory for them before the rest
            goes to ``spill_dir``; None: all goes there.
        skip_nonfinite: leave a step out whose gradients are not all finite.
        device: the accelerator, where parameters are on the CPU still, as a session brings them
            there; None: where they are.
        queues: of the accelerator; None: torch's streams, or the CPU's own.
        options: of ``kind``, such as ``lr``.

    Attributes:
        plan: where updates are computed, and why.
        place: ``"host"`` or ``"device"``.
        threads: that update on the host.
        overflowed: whether the last step was left out.
        delayed: may be set between steps.

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
        place: str = "auto",
        tile_bytes: int | str = 8 * MiB,
        delayed: bool = False,
        warmup_steps: int = 0,
        threads: int | None = None,
        spill_dir: str | Path | None = None,
        host_budget: int | str | None = None,
        skip_nonfinite: bool = False,
        device: torch.device | str | None = None,
        queues: Queues | None = None,
        **options: Any,
    ) -> None:
        self._rule = Rule(kind, options)
        size = parse_bytes(tile_bytes, "tile_bytes")
        check_options(place, size, delayed, warmup_steps, spill_dir, host_budget)
        self._may_delay = self._delayed = delayed
        self.warmup_steps = warmup_steps
        self.skip_nonfinite, self.overflowed = skip_nonfinite, False
        self._entries: dict[torch.Tensor, Entry] = {}
        self._claims = Claims(self, _leaving(weakref.ref(self)))
        self._handles: dict[Entry, Any] = {}
        self._stores: Stores | None = None
        self._lost: BaseException | None = None
        self._reading = Reading()
        self._by_scaler = self._closed = False
        self._late = False  # whether parameters may lag without an update that is under way
        self._steps = 0
        super().__init__(params, self._rule.defaults)
        fresh = self._fresh(self.param_groups)
        self._queues = queues or queues_of((entry.parameter for entry in fresh), device)
        self._coming = device is not None
        check_entries(fresh, self._queues.device, coming=self._coming)
        here = self._queues.device
        self._crew = Crew(here, cores_for(address_of(here), peers_of(here)), threads)
        try:
            self.plan = self._choose(place, fresh)
            self.place, self.threads = self.plan.place, self._crew.threads
            if delayed:
                check_delay(self.place)
            stores = self._stores = Stores(
                self._queues,
                self._crew,
                tile_bytes=size,
                spill_dir=None if spill_dir is None else Path(spill_dir),
                host_budget=None
                if host_budget is None
                else parse_bytes(host_budget, "host_budget"),
                on_host=self.place == "host",
                banks=2 if delayed else 1,
            )
            stores.departures.checks = skip_nonfinite
            stores.take_in(fresh)
            self._hosting = Hosting(self._rule, self._crew, stores)
            self._streaming = Streaming(self._rule, self._queues, stores)
            self._delay = Delay(self._hosting)
        except BaseException:
            self._crew.close()
            raise
        self._finalizer = weakref.finalize(self, stores.close)
        self._show(fresh)
        self._say_plan()

    @property
    def kind(self) -> str:
        """Name of torch's optimizer that makes the updates."""
        return self._rule.kind.__name__

    @property
    def delayed(self) -> bool:
        """Whether updates are made beside the next step; see [Note: delayed].

        Raises:
            ConfigError: it is set, and the optimizer was made without.
        """
        return self._delayed

    @delayed.setter
    def delayed(self, delayed: bool) -> None:
        if delayed and not self._may_delay:
            raise ConfigError(
                "updates can be delayed only where there is memory for two steps' gradients: make "
                "the optimizer with delayed=True, and set it to False until then"
            )
        self._delayed = delayed

    # What is taken in

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as with torch's optimizers; of the same device as the others.

        Raises:
            ConfigError: one of them is not served; nothing was added.
        """
        super().add_param_group(param_group)
        if self._stores is None:
            return
        try:
            self._check_open()
            fresh = self._fresh(self.param_groups[-1:])
            check_entries(fresh, self._queues.device, coming=self._coming)
            self._stores.take_in(fresh)
        except BaseException:
            self.param_groups.pop()
            raise
        self._show(fresh)

    def _fresh(self, groups: Sequence[Group]) -> list[Entry]:
        """Return entries for the parameters of ``groups``."""
        found = []
        for number, group in enumerate(groups, len(self.param_groups) - len(groups)):
            moments = self._rule.moments(group)
            names = [repr(name) for name in group.get("param_names", ())]
            names = names or [
                f"parameter {n} of group {number}" for n in range(len(group["params"]))
            ]
            for name, parameter in zip(names, group["params"], strict=True):
                found.append(Entry(name, parameter, moments))
        return found

    def _show(self, entries: Sequence[Entry]) -> None:
        """Show entries as ``state``, and take their gradients from now on."""
        self._may_be_reduced = self.place == "host"
        self._claims.add(entries)
        for entry in entries:
            self._entries[entry.parameter] = entry
            self.state[entry.parameter] = entry.state()
            self._watch(entry)

    def _watch(self, entry: Entry) -> None:
        if self.place != "host" or entry in self._handles or not entry.parameter.requires_grad:
            return
        leave = _leaver(weakref.ref(self), entry)
        handle = entry.parameter.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]
        self._handles[entry] = handle

    def _choose(self, place: str, entries: Sequence[Entry]) -> Plan:
        if place != "auto":
            return Plan(place, "as it was asked for")
        if isinstance(self._queues, Immediate):
            return Plan("host", "parameters are on the CPU, and no link is crossed")
        group = self.param_groups[0]
        return plan_by(measure(self._queues, self._rule, self._crew, group), entries)

    def _say_plan(self) -> None:
        if launched_rank():
            return
        stores, cores = self._held(), self._crew.cores
        elements = sum(entry.numel for entry in self._entries.values())
        node = "" if cores.node < 0 else f" of memory node {cores.node}"
        logger.info(
            "HostOptimizer: %s of %.1f million elements on %s, %s of masters and moments in memory "
            "and %s in a file, gradients through %s; updates on the %s, by %d threads on %d "
            "cores%s (%s)%s",
            self.kind,
            elements / 1e6,
            self._queues.name,
            format_bytes(stores.memory_bytes),
            format_bytes(stores.file_bytes),
            format_bytes(stores.pinned_bytes),
            self.place,
            self.threads,
            len(cores.numbers),
            node,
            self.plan.reason,
            f", delayed after {self.warmup_steps} steps" if self.delayed else "",
        )

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that have left; or make them zero."""
        super().zero_grad(set_to_none)
        if self._stores is not None and not self._closed:
            if set_to_none:
                self._stores.departures.drop()
            else:
                self._stores.departures.zero()
        self._reading = Reading()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their common norm, before ``step()``.

        The bits are those of `torch.nn.utils.clip_grad_norm_` with ``foreach=False``; after a
        `GradScaler` has unscaled, of that on float32 gradients. The 2-norm of a gradient is
        computed where it was made; of one that was added up over several backwards, or is clipped
        already, and any other norm, on the host. Gradients are multiplied as the step reads them;
        clipping again clips what the call before has left, as torch's does.

        Args:
            max_norm: of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is no finite number.

        Returns:
            The norm before, of no dimension.

        Raises:
            RuntimeError: the norm is not finite, and was to be.
        """
        stores = self._held()
        self._gather()
        entries = [self._entries[p] for group in self.param_groups for p in group["params"]]
        order = float(norm_type)
        if self.place == "host":
            norms = stores.departures.norms(entries, order, self._reading)
        else:
            norms = norms_in_place(entries, order, self._reading)
        total = total_norm(norms, order)
        if not norms:  # what comes later is not clipped
            return total
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}: pass "
                "error_if_nonfinite=False to scale them by it"
            )
        coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        self._reading = self._reading.clipped(coefficient)
        return total

    @torch.no_grad()
    def unscale(self, inverse: torch.Tensor) -> bool:
        """Have the next step read gradients times ``inverse``; for `dynoffload.optim.GradScaler`.

        Args:
            inverse: of the loss scale, float32 of no dimension.

        Returns:
            Whether all gradients are finite.
        """
        departures = self._held().departures
        self._gather()
        departures.checks = True
        self._reading = Reading(inverse, self._reading.coefficients)
        return self._are_finite()

    def _are_finite(self) -> bool:
        if self.place == "host":
            return self._held().departures.are_finite()
        return are_finite_in_place(self._entries)

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """Let a `dynoffload.optim.GradScaler` step, or leave a step out, in this block."""
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
            "use dynoffload.optim.GradScaler in its place"
        )

    def _gather(self) -> None:
        """Take gradients that are there without a hook: of parameters that were thawed since, or
        that somebody has put there."""
        for parameter, entry in self._entries.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            check_gradient(entry, gradient)
            if self.place == "host":
                parameter.grad = gradient.detach().clone()  # whoever holds it keeps it
                self._held().departures.leave(entry)
                self._watch(entry)

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; see [Note: semantics] and [Note: gradients].

        Args:
            closure: computes the loss anew and returns it, called once.

        Raises:
            StepLostError: it was cut off, as by a file that cannot be read: some parameters have it
                and others not, until a state is loaded.
            ConfigError: an option was switched on that needs state which there is none of; another
                optimizer of this type was made over a parameter since; or its gradients are those
                of a `DistributedDataParallel` of several processes.
        """
        self._held()
        self._claims.check(self._entries.values())
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.inference_mode(False), torch.no_grad():
            self._commit()
        return loss

    def _commit(self) -> None:
        stores = self._held()
        if self._may_be_reduced:
            check_not_reduced(self._entries)
            self._may_be_reduced = False
        self._gather()
        groups = self._with_gradients()
        self._end_delayed()
        self.overflowed = self.skip_nonfinite and not self._are_finite()
        if self.overflowed:
            self.zero_grad()
            return
        agree(groups, stores)
        arrived = stores.departures.take() if self.place == "host" else {}
        work = work_of(groups, stores.tiles, arrived, self._reading)
        interrupt = None
        if self.delayed and self._steps >= self.warmup_steps:
            self._delay.begin(work)
        else:
            interrupt = self._compute(work)
        self._reading = Reading()
        self._steps += 1
        if interrupt is not None:
            raise interrupt

    def _with_gradients(self) -> dict[Entry, Group]:
        arrived = self._held().departures.arrived
        found: dict[Entry, Group] = {}
        for group in self.param_groups:
            values, moments = self._rule.hyperparameters(group), self._rule.moments(group)
            for parameter in group["params"]:
                entry = self._entries[parameter]
                if entry not in arrived if self.place == "host" else parameter.grad is None:
                    continue
                if lacking := [key for key in moments if key not in entry.moments]:
                    raise ConfigError(
                        f"{entry.name} has no {lacking[0]}, as its group was made without: make "
                        "the optimizer with that option, and load its state"
                    )
                found[entry] = values
        return found

    def _compute(self, work: Work) -> KeyboardInterrupt | None:
        if self.place == "device":
            slots = self._streaming.open(work)
            with self._losing():
                self._streaming.run(work, slots)
            return None
        with self._losing():
            interrupt = self._hosting.run(work)
        self._held().departures.settle()
        return interrupt

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """What is cut off in this block is lost."""
        try:
            yield
        except BaseException as error:
            self._lost = error
            raise StepLostError(
                f"a step of HostOptimizer was cut off ({error}): some masters have it and others "
                "do not; go on from the last checkpoint, with load_state_dict()"
            ) from error

    # Delayed updates

    def _end_delayed(self) -> None:
        """Let parameters take over the update that was made beside this step, or before a load."""
        self._delay.wait()  # Ctrl-C leaves it to the next call, here and below
        with self._losing():
            self._delay.check()
        self._delay.end()
        if self._late:
            with self._losing():
                catch_up([e for e in self._entries.values() if e.lags], self._held())
            self._late = False

    @torch.no_grad()
    def finish(self) -> None:
        """Make a delayed update that is under way, and let parameters take it over now.

        For the end of training, and for what is to be evaluated or exported; training that goes on
        from here has had one step without delay.

        Raises:
            StepLostError: it was cut off.
        """
        self._held()
        self._end_delayed()

    def settle(self) -> None:
        """Wait until masters and moments are those of all steps; parameters may lag.

        Raises:
            StepLostError: a step was cut off.
        """
        stores = self._held()
        self._delay.wait()
        with self._losing():
            self._delay.check()
        stores.settle()

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
        """Load what `state_dict` has returned, whatever its place and tiles; or the state of the
        torch optimizer itself, to which the parameters' own values are the masters.

        Hooks see the state without tensors, as those are read into their places.

        Raises:
            ConfigError: it is of other parameters, or lacks something; nothing was changed.
            SpillError: it cannot be written to the file.
        """
        self._check_open()
        check_state(state_dict, self.param_groups, self._entries, self._rule.defaults)
        self.begin_load()
        stores = self._stores
        assert stores is not None
        super().load_state_dict({**state_dict, "state": {}})
        fill(state_dict, self.param_groups, self._entries)
        stores.sync()
        self.state.clear()
        self.loaded()

    def begin_load(self) -> None:
        """The state is about to be loaded: what is under way ends first, well or not."""
        self._check_open()
        self._delay.drop()
        assert self._stores is not None
        self._stores.settle()

    def loaded(self) -> None:
        """The state was loaded, tensor by tensor, into what ``state`` shows, or in its place."""
        stores = self._stores
        assert stores is not None
        take_over(self.state, self._entries.values())
        self._lost, self._late = None, True
        self.zero_grad()
        stores.sync()
        self._steps = int(max((float(e.step) for e in self._entries.values()), default=0.0))

    # The end

    def close(self) -> None:
        """Make what is under way, let go of parameters, and give memory and files back.

        Raises:
            StepLostError: a delayed update was cut off; all else was done.
        """
        if self._closed:
            return
        try:
            if self._lost is None:
                self.finish()
        finally:
            self._closed = True
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()
            self._claims.release(self._entries.values())
            self.state.clear()
            self._finalizer()

    def __enter__(self) -> HostOptimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a HostOptimizer is not copied or pickled, with its threads and its memory: save its "
            "state_dict(), and make another one"
        )

    def _held(self) -> Stores:
        """Return what is held, if a step can go on from it."""
        self._check_open()
        if self._lost is not None:
            raise StepLostError(
                f"a step of HostOptimizer was cut off before ({self._lost}): go on from the last "
                "checkpoint, with load_state_dict()"
            ) from self._lost
        assert self._stores is not None
        return self._stores

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this HostOptimizer is closed: make another one")


def _leaving(optimizer: weakref.ref[HostOptimizer]) -> Callable[[Entry], bool]:
    def taken(entry: Entry) -> bool:
        alive = optimizer()
        return (
            alive is not None
            and alive._stores is not None
            and not alive._closed
            and entry in alive._stores.departures.arrived
        )

    return taken


def _leaver(optimizer: weakref.ref[HostOptimizer], entry: Entry) -> Callable[[torch.Tensor], None]:
    known = weakref.ref(entry)  # a parameter that its own hook holds is never let go of

    def leave(parameter: torch.Tensor) -> None:
        alive, entry = optimizer(), known()
        if alive is None or entry is None or alive._stores is None or alive._closed:
            return
        if alive._claims.has(entry):
            alive._stores.departures.leave(entry)

    return leave
