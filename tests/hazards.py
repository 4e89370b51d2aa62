"""One training program run twice, plainly and under a budget, for the tests of hazards.

A program opens its block through a `Side`, which notes what must not differ; `hazard` runs it on
the plain side and on a paged one, and compares the notes bit for bit. `compared` makes a test of a
program, and `stepwise` one of a function that makes one step of the usual program, `trained`.

The backends are those of `tests/devices.py`; ``emulated``: an accelerator made of threads, which
finds races; ``torch``: the backend of `tests/backend`, alone in its process, where temporaries
count too and budgets are larger; and ``aside``: a budget that holds everything, where paging steps
out of the way after two steps and every tensor becomes ordinary in mid-run.

A look at a parameter makes its update, so a program notes little but losses while it trains.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import exactness
import pytest
import torch
from devices import KINDS, NO_PAGER, needs_pager
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    Mlp,
    assert_ordinary,
    assert_same,
    footprint_of,
    least_budget,
    loss_of,
)
from exactness import batch as batch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.memory.local import is_wrapper, wrapped
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.session import Session
from dynoffload.units import KiB, MiB

_MARKS = {"pager": [needs_pager], "aside": [pytest.mark.slow]}


def _each(kinds: Sequence[str], slow: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by backend; where the pager works, those in ``slow`` are slow cases."""
    if exactness.HOME.type != "cpu":
        marks = [] if "emulated" in kinds else [pytest.mark.skip(reason="not of accelerators")]
        return pytest.mark.parametrize("backend", [pytest.param("torch", marks=marks)])
    marks = {**_MARKS, **({} if NO_PAGER else {key: [pytest.mark.slow] for key in slow})}
    cases = [pytest.param(kind, marks=marks.get(kind, [])) for kind in kinds]
    return pytest.mark.parametrize("backend", cases)


_OTHERS = ("mapped", "emulated")

each_backend = _each([*KINDS, "emulated", "aside"], slow=["mapped"])
"""Every backend; ``aside`` in ``make slow``, as `tests/test_aside.py` has what is its own, and so
``mapped``, which puts nothing off, where the pager works."""

each_of_the_cpu = _each([*KINDS, "aside"], slow=["mapped"])
"""For what no accelerator's tensors can do, such as to share memory with arrays of numpy."""

each_backend_in_time = _each([*KINDS, "emulated", "aside"], slow=_OTHERS)
"""For tests of many cases: where the pager works, the others run in ``make slow``."""

each_paged = _each(KINDS)
"""For what is the session's own, and plain PyTorch does not do."""

each_paged_in_time = _each(KINDS, slow=_OTHERS)
"""The same for tests of many cases."""

each_with_slices_in_time = _each([*KINDS, "emulated"], slow=_OTHERS)
"""For tests of many cases of what is paged by slices, which one that has stepped aside is not."""

each_of_accelerators = _each(["emulated"])
"""For what is of accelerators alone."""

guarded = _each(["pager"])
"""For what only a backend that puts updates off can get wrong."""


@dataclass
class Side:
    """One of the two runs of a program.

    Attributes:
        backend: None for the plain run.
        notes: what the program has seen, in order.
        sessions: of the blocks that it opened, with their budgets.
        peaks: of the blocks on the backend ``torch``: their budget, the bytes of regions that must
            find room at once, and for each step the peak of torch's allocator and that of regions.
        aside: how many of them had stepped aside when they ended.
    """

    backend: str | None = None
    notes: list[tuple[str, Any]] = field(default_factory=list)
    sessions: list[tuple[Session, int]] = field(default_factory=list)
    peaks: list[tuple[int, int, list[tuple[int, int]]]] = field(default_factory=list)
    aside: int = 0

    @contextmanager
    def offload(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        share: float = 0.3,
        states: int = 2,
        watched: bool = True,
        **config: Any,
    ) -> Iterator[Session | None]:
        """Open a block whose budget is ``share`` of what the model takes; note the state at its
        end. Unless ``watched``, no mode of the emulated accelerator is on."""
        model.to(exactness.HOME)
        if self.backend is None:
            yield None
        else:
            options = {**SMALL_PAGES, "step_aside": False, "policy": "repeat", **config}
            if self.backend == "aside":
                options["step_aside"] = True
                budget = footprint_of(model, states) * 4 + 8 * MiB
            else:
                if self.backend not in ("emulated", "torch"):
                    options["backend"] = self.backend
                wanted = int(share * footprint_of(model, states))
                budget, _ = least_budget(model, optimizer, wanted, options)
            below, device = contextlib.nullcontext(), None
            if self.backend == "torch":
                from accelerator import late  # of `tests/backend`

                below, device = late(), exactness.HOME
                # The allocator counts all that is there, and an eighth is kept for temporaries.
                gc.collect()
                budget += budget // 5 + torch.accelerator.memory_allocated() + 16 * KiB
            if self.backend == "emulated":
                below, device = accelerated(watched=watched), DEVICE
            with below:
                with dynoffload.offload(
                    model, optimizer, budget=budget, pilot=None, device=device, config=options
                ) as session:
                    self.sessions.append((session, budget))
                    if self.backend == "torch":
                        sizes = session._paging.device._workspace  # type: ignore[union-attr]
                        self.peaks.append((budget, sizes._least, _noted_peaks(sizes)))
                    yield session
                    self.aside += not session.paging
                assert_ordinary(model, optimizer, hooks=False, held=True)
        self.see_state(model, optimizer)

    @property
    def paging(self) -> Paging | None:
        """The paging of the last block, None on the plain side and where it has stepped aside."""
        return self.sessions[-1][0]._paging if self.sessions else None

    @contextmanager
    def block(
        self, make: Callable[[], nn.Module] | None = None, **options: Any
    ) -> Iterator[tuple[Any, AdamW]]:
        """Open a block for a new network, an `Mlp` by default, and its AdamW."""
        model = (Mlp() if make is None else make()).to(exactness.HOME)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with self.offload(model, optimizer, **options):
            yield model, optimizer

    def train(self, model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
        """Make the usual steps."""
        for step in steps:
            self.step(loss_of(model, step), optimizer)

    def see(self, what: str, value: Any) -> None:
        """Note a value, or a nest of them, as it is now."""
        self.notes.append((what, _frozen(value)))

    def see_state(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Note parameters, gradients, buffers and optimizer state."""
        named = dict(model.named_parameters())
        self.see("parameters", named)
        self.see("gradients", {name: p.grad for name, p in named.items()})
        self.see("buffers", dict(model.named_buffers()))
        if optimizer is not None:
            self.see("optimizer", optimizer.state_dict())

    def fails(self, what: str, do: Callable[..., Any], *args: Any) -> BaseException | None:
        """Note with which type of error ``do`` fails, or that it does not; return the error."""
        try:
            do(*args)
        except Exception as error:
            self.see(what, type(error).__name__)
            return error
        self.see(what, "no error")
        return None

    def step(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        *,
        set_to_none: bool = True,
        zero: bool = True,
        within: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Make one step as most loops do, the optimizer's ``within`` a context."""
        loss.backward()
        with within or contextlib.nullcontext():
            optimizer.step()
        if zero:
            optimizer.zero_grad(set_to_none=set_to_none)
        self.see("loss", loss)


def hazard(
    backend: str,
    program: Callable[[Side], None],
    *,
    moves: bool = True,
    budgeted: bool = True,
    aside: bool = True,
) -> Side:
    """Run ``program`` on both sides and assert that nothing it has noted differs.

    Args:
        backend: of the paged side.
        program: takes the side.
        moves: whether to assert that bytes have moved, without which it would show little.
        budgeted: whether to assert that no step took more than the budget, nor the allocator of the
            backend ``torch``. The memory of parameters and gradients that the program holds itself
            is counted, and cannot leave.
        aside: whether to assert, of the backend ``aside``, that some session has stepped aside.
            It stays where the program keeps hold of paged memory, or makes no steps.

    Returns:
        The paged side.
    """
    plain, paged = Side(), Side(backend)
    for side in (plain, paged):
        torch.manual_seed(0)
        program(side)
        side.see("state of the random numbers", torch.get_rng_state())
    assert [what for what, _ in paged.notes] == [what for what, _ in plain.notes]
    for number, ((what, actual), (_, expected)) in enumerate(
        zip(paged.notes, plain.notes, strict=True)
    ):
        assert_same(actual, expected, f"{what} (note {number})")
    if backend == "aside":
        assert paged.aside or not aside, "paging never stepped aside: this shows nothing"
    else:
        for session, budget in paged.sessions:
            for step in session.log.steps if budgeted and backend != "torch" else ():
                assert step.peak_fast_bytes <= budget, f"step {step.step}: {step.peak_fast_bytes}"
        for budget, least, peaks in paged.peaks if budgeted else ():
            _assert_allocated(budget, least, peaks)
        if moves:
            rows = [row for session, _ in paged.sessions for row in session.log.steps]
            moved = sum(row.bytes_in + row.bytes_out for row in rows)
            assert moved, "no byte was moved: this shows nothing"
    return paged


def _noted_peaks(sizes: WorkspaceEstimate) -> list[tuple[int, int]]:
    """Return a list that gets the arguments of each call of ``sizes.after``."""
    peaks, after = list[tuple[int, int]](), sizes.after

    def noted(peak: int, regions: int) -> int:
        peaks.append((peak, regions))
        return after(peak, regions)

    sizes.after = noted  # type: ignore[method-assign]
    return peaks


def _assert_allocated(budget: int, least: int, peaks: list[tuple[int, int]]) -> None:
    """Assert that the peak of the backend's own allocator kept the budget after the first step.

    A step may pass it by what it takes beside regions more than each step before: nobody knew. The
    ``least`` bytes of regions are there in any case.
    """
    most = 0
    for step, (peak, regions) in enumerate(peaks):
        assert peak, "the allocator counted nothing: this shows nothing"
        beside = peak - regions
        if step:
            allowed = max(budget, least + beside) + max(0, beside - most)
            assert peak <= allowed, f"step {step}: {peak} were allocated under {budget}"
        most = max(most, beside)


def _frozen(value: Any) -> Any:
    if is_wrapper(value):
        return [_frozen(part) for part in wrapped(value)]
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.to_dense()
        return value.clone().resolve_conj().resolve_neg().cpu()
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return value


_ADAMW = partial(AdamW, lr=1e-2)


def trained(
    make: Callable[..., nn.Module] = Mlp,
    each: Callable[..., None] | None = None,
    *,
    loss: Callable[..., Tensor] = loss_of,
    after: Callable[[int, Any], None] = lambda step, model: None,
    optimizer: Callable[..., Optimizer] = _ADAMW,
    steps: int = 4,
    case: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Callable[[Side], None]:
    """Return the program that trains ``make()`` in one block.

    Args:
        make: returns the network.
        each: makes a step, and takes what it names of ``side``, ``model``, ``optimizer`` and the
            case; other names are those of the four that are left. By default the usual one.
        loss: of a model and the number of a step.
        after: called after each step.
        optimizer: returns the one for parameters.
        steps: their number.
        case: arguments of a parametrized test. Functions are given those that they name.
        options: of the block.
    """

    def program(side: Side) -> None:
        model = _call(make, case).to(exactness.HOME)  # some optimizers make their state at once
        its = _call(optimizer, case, model.parameters())
        with side.offload(model, its, **{key: _of(one, case) for key, one in options.items()}):
            for step in range(_of(steps, case)):
                if each is None:
                    side.step(_call(loss, case, model, step), its)
                else:
                    there = {"side": side, "model": model, "optimizer": its, "step": step}
                    known = {**there, **case}
                    names = inspect.signature(each).parameters
                    left = (one for name, one in there.items() if name not in names)
                    each(**{name: known[name] if name in known else next(left) for name in names})
                after(step, model)

    return program


def trains(backend: str, each: Any, network: Any = Mlp, **options: Any) -> Side:
    """Run, as `hazard` does, the program `trained` that makes each step by ``each``."""
    return hazard(backend, trained(network, each, **options))


def _call(function: Callable[..., Any], case: Mapping[str, Any], *arguments: Any) -> Any:
    """Call ``function`` with ``arguments``, and with those of ``case`` that it names."""
    named = list(inspect.signature(function).parameters)[len(arguments) :]
    return function(*arguments, **{name: case[name] for name in named if name in case})


def _of(value: Any, case: Mapping[str, Any]) -> Any:
    """Return ``value``, or what it says of a case."""
    return _call(value, case) if callable(value) else value


def compared(
    backends: pytest.MarkDecorator, **flags: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a program, which is run on both sides by `hazard`; its ``flags`` are truths or
    functions of the test's parametrized arguments."""

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        def run(case: dict[str, Any]) -> Callable[[Side], None]:
            return lambda side: _call(program, {"side": side, **case})

        return _test(backends, program, run, flags)

    return decorate


def stepwise(
    backends: pytest.MarkDecorator,
    make: Callable[..., nn.Module] = Mlp,
    *,
    moves: Any = True,
    budgeted: Any = True,
    aside: Any = True,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that makes one step; see `compared` and `trained`; options may be
    functions of the test's parametrized arguments too."""
    flags = {"moves": moves, "budgeted": budgeted, "aside": aside}

    def decorate(each: Callable[..., None]) -> Callable[..., None]:
        return _test(backends, each, lambda case: trained(make, each, case=case, **options), flags)

    return decorate


def prepared(
    backends: pytest.MarkDecorator,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that prepares an `Mlp` or its optimizer for the usual steps: as the
    block begins, or before."""

    def decorate(prepare: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(prepare)
        def program(side: Side, when: str) -> None:
            model = Mlp()
            optimizer = _ADAMW(model.parameters())
            do = partial(_call, prepare, {"side": side, "model": model, "optimizer": optimizer})
            if when == "before":
                do()
            with side.offload(model, optimizer):
                if when == "inside":
                    do()
                side.train(model, optimizer, range(4))

        program.__signature__ = inspect.signature(lambda side, when: None)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("when", ["before", "inside"])(compared(backends)(program))

    return decorate


_OF_A_STEP = {"side", "model", "optimizer", "step", "number"}


def _test(
    backends: pytest.MarkDecorator,
    function: Callable[..., None],
    run: Callable[[dict[str, Any]], Callable[[Side], None]],
    flags: Mapping[str, Any],
) -> Callable[..., None]:
    """Return a test, named as ``function`` and with its parametrized arguments, of the program that
    ``run`` returns for a case."""

    @functools.wraps(function)
    def test(backend: str, **case: Any) -> None:
        case["backend"] = backend
        hazard(backend, run(case), **{name: _of(flag, case) for name, flag in flags.items()})

    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    cases = [name for mark in marks for name in re.findall(r"\w+", str(mark.args[0]))]
    named = dict.fromkeys(["backend", *inspect.signature(function).parameters, *cases])
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = [inspect.Parameter(name, kind) for name in named if name not in _OF_A_STEP]
    test.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return backends(test)
