"""Estimates training under a budget: memory by tier, bytes moved, seconds, and the bottleneck.

`estimates` measures a few plain steps (`measuring`), divides the budget as the runtime would, and
simulates training under it on this machine's link.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.estimation.calibration import Calibration, Fitted
from dynoffload.estimation.hollow import hollowed
from dynoffload.estimation.measuring import Loss, Measured, measure, states_of, update_seconds
from dynoffload.estimation.result import OVER, UNDER, Estimate, judged, with_note
from dynoffload.managed import is_managed
from dynoffload.memory.pager import probe
from dynoffload.memory.spill import check_room, default_spill_dir, grown
from dynoffload.pilot.progress import Report
from dynoffload.runtime.adoption.slicing import may_slice, slices_of, sole_owners
from dynoffload.runtime.counting import States, is_trained, whole_bytes
from dynoffload.runtime.offload import check_parameters
from dynoffload.runtime.opening import IO_THREADS
from dynoffload.runtime.resident import stays
from dynoffload.runtime.sizing import Sizing, sizing_of
from dynoffload.runtime.updates.update import innermost
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.overhead import Division
from dynoffload.simulation.pager import SimulatedPager
from dynoffload.simulation.recorded import Network, Recorded
from dynoffload.simulation.training import Training
from dynoffload.units import format_bytes, parse_bytes

_BATCHES = 6  # most batches measured
_WARMUP = 4  # simulated steps that do not count: the first creates optimizer state
_STEPS = 8  # fewest simulated steps that count
_DIVIDED = frozenset(Division.__dataclass_fields__)


def estimates(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budgets: Sequence[int | str],
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    spill_dir: str | Path | None = None,
    calibration: Calibration | str | Path | None = None,
    report: Report = lambda *_: None,
) -> list[Estimate]:
    """Estimate training ``model`` under each of ``budgets``, without training or changing it.

    Forward and backward run on up to six batches. Each gradient is dropped when complete, so they
    need memory for the activations of one step and for incomplete gradients. Timing the optimizer
    takes some hundred MiB. A model on the meta device gets weights that take no memory
    (`dynoffload.estimation.hollow`). State that forward keeps outside of buffers, such as a cache
    or its own generator, changes as in training.

    Args:
        model: the model, in memory or on the meta device.
        batches: as for `dynoffload.profile`; up to six are used.
        budgets: bytes of fast memory, or strings such as ``"8GiB"``; they may be more than this
            machine has.
        optimizer: the optimizer that will train it.
        loss: as for `dynoffload.profile`.
        config: as for `dynoffload.offload`.
        spill_dir: directory of the spill file, as for `dynoffload.offload`.
        calibration: the calibration of this machine, or the path of what was fitted on it; by
            default the shipped costs. Unless a `Calibration` is given, the link and the runtime's
            pace are measured.
        report: receives progress.

    Returns:
        An estimate for each budget; one is not ``feasible`` if its budget is too small.

    Raises:
        ConfigError: options that cannot be simulated, a model inside of an offload() block, one
            that fails on a batch or whose forward writes into its weights, an optimizer of another
            model, or no batch.
        TraceError: a batch gives no loss.
        SpillError: the spill directory cannot be used.
    """
    options = OffloadConfig.of(config).with_policy()
    check_options(options)
    if is_managed(model):
        raise ConfigError(
            f"this {type(model).__name__} is inside an offload() block, where its steps are not "
            "plain: estimate before"
        )
    sizes = [parse_bytes(budget, "budget") for budget in budgets]
    optimizer = None if optimizer is None else innermost(optimizer)
    if optimizer is not None:
        check_parameters(model, optimizer)
    directory = Path(spill_dir or default_spill_dir())
    check_room(directory, {})
    given: Calibration | Fitted
    given = calibration if isinstance(calibration, Calibration) else Fitted.of(calibration)
    taken = list(itertools.islice(iter(batches), _BATCHES))
    assumed = []
    if any(parameter.is_meta for parameter in model.parameters()):
        assumed.append("weights are random numbers, buffers ones, as the model is on meta")
    if options.policy == "pilot":
        assumed.append("the prediction is taken to be the last order, whatever a pilot knows")
    with hollowed(model):
        plain = measure(model, taken, loss, report)
    report("timing the optimizer")
    update_s = 0.0 if optimizer is None else update_seconds(optimizer)
    states = states_of(model, optimizer)
    measured = replace(
        plain,
        steps=tuple(
            replace(step, update_s=update_s * _updated(plain.network, step), states=states)
            for step in plain.steps
        ),
    )
    if isinstance(given, Fitted):  # it was read earlier, so that a bad file fails at once
        report("measuring the disk")
        given = given.measured(directory)
    assumed.append(given.said)
    known = replace(_known(model, optimizer, measured), assumptions=tuple(assumed))
    found = []
    for number, size in enumerate(sizes):
        report("simulating", number, len(sizes))
        found.append(
            _under(replace(known, budget=size), model, optimizer, measured, options, given)
        )
    return found


def _updated(network: Network, step: Recorded) -> float:
    """Return the share of the trained parameters with a gradient in ``step``, by bytes."""
    trained = {number: one.nbytes for number, one in enumerate(network.parameters) if one.trained}
    own = sum(trained.get(number, 0) for number in step.completed)
    return own / max(1, sum(trained.values()))


def _under(
    known: Estimate,
    model: nn.Module,
    optimizer: Optimizer | None,
    measured: Measured,
    options: OffloadConfig,
    calibration: Calibration,
) -> Estimate:
    """Return the estimate for the budget of ``known``."""
    try:
        sizing = sizing_of(model, optimizer, known.budget, options)
    except BudgetError as error:
        return replace(
            known, reason=str(error), least=error.lacking and known.budget + error.lacking
        )
    known = replace(
        known,
        feasible=True,
        staging=2 * sizing.chunk_bytes + sizing.reserve_bytes,
        fast_peak=known.budget,
        file_peak=sizing.spill_bytes,
    )
    whole = whole_bytes(model, optimizer) + measured.saved_bytes
    if options.step_aside and stays(whole, known.budget):
        low, high = (known.plain_s * share for share in measured.spread)
        return replace(
            judged(known, known.plain_s, low, high),
            timed=True,
            resident=True,
            staging=0,
            fast_peak=whole,
            bound="compute",
        )
    sliced = _sliced(model, optimizer, options, sizing)
    if sliced:
        options = replace(options, slices=False)
        try:
            sizing = sizing_of(model, optimizer, known.budget, options)
        except BudgetError:
            return with_note(
                known,
                f"this budget has no room for {sliced} as a whole, which the session pages by "
                "slices and the simulation does not: bytes and times are not estimated",
            )
        known = with_note(
            known,
            f"{sliced} are estimated as paged whole, though experts that are not hit move no byte: "
            "training is faster than this where few are hit",
        )
    if all(one.nbytes < sizing.min_paged_bytes for one in measured.network.parameters):
        return with_note(
            known,
            f"no parameter has {format_bytes(sizing.min_paged_bytes)}, so none is paged, and bytes "
            "and times are not estimated: lower min_paged_bytes",
        )
    return _simulated(known, measured, sizing, options, calibration)


def check_options(options: OffloadConfig) -> None:
    """Refuse options that cannot be simulated.

    Raises:
        ConfigError: an option cannot be simulated.
    """
    if options.backend == "mapped" or (options.backend == "auto" and probe()):
        raise ConfigError(
            "the mapped-file backend cannot be estimated, as the kernel decides what moves"
            + ("" if options.backend == "mapped" else f" (no pager here: {probe()})")
        )
    for key, usual in (("rollback", False), ("defer_updates", "auto"), ("page_activations", True)):
        if getattr(options, key) != usual:
            raise ConfigError(
                f"{key}={getattr(options, key)!r} cannot be estimated: leave it at {usual!r}"
            )


def _sliced(
    model: nn.Module, optimizer: Optimizer | None, options: OffloadConfig, sizing: Sizing
) -> str:
    """Return a text naming the parameters that are paged by slices, "" if none are."""
    if not (options.slices and may_slice(optimizer)):
        return ""
    alone = sole_owners(model.parameters())
    page, least = sizing.page_bytes, sizing.min_paged_bytes
    names = [
        name
        for name, one in model.named_parameters()
        if name in sizing.flat or (id(one) in alone and slices_of(one, page, least) > 1)
    ]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""


def _known(model: nn.Module, optimizer: Optimizer | None, measured: Measured) -> Estimate:
    """Return the part of the estimate that does not depend on the budget."""
    states = States(optimizer)
    parameters = list(model.parameters())
    trained = [one for one in parameters if is_trained(one)]
    return Estimate(
        model=type(model).__name__,
        budget=0,
        feasible=False,
        parameters=sum(one.nbytes for one in (*parameters, *model.buffers())),
        gradients=sum(one.nbytes for one in trained),
        optimizer=sum(sum(states.sizes(one)) for one in trained),
        activations=measured.saved_bytes,
        temporaries=measured.temporaries,
        plain_s=measured.seconds,
    )


def _simulated(
    known: Estimate,
    measured: Measured,
    sizing: Sizing,
    options: OffloadConfig,
    calibration: Calibration,
) -> Estimate:
    division = Division(**{key: value for key, value in asdict(sizing).items() if key in _DIVIDED})

    training = Training(
        measured.network,
        division,
        replace(calibration.machine, workers=IO_THREADS),
        prefetch=options.policy != "on-demand",
        work=calibration.work,
    )
    rounds = -(-_STEPS // len(measured.steps))  # all batches count equally often
    count = _WARMUP + rounds * len(measured.steps)
    order = itertools.islice(itertools.cycle(measured.steps), count)
    steps = [training.step(step) for step in order][_WARMUP:]
    link = calibration.machine.link
    seconds, compute, stall = (_mean(steps, key) for key in ("seconds", "compute_s", "stall_s"))
    bytes_in, bytes_out = (_mean(steps, key) for key in ("bytes_in", "bytes_out"))
    reading = bytes_in / link.read_bps >= bytes_out / link.write_bps
    parts = {
        "compute": compute,
        "own work": max(0.0, seconds - compute - stall),
        "reads" if reading else "writes": stall,
    }
    low, high = (
        compute * plain + parts["own work"] * own + stall
        for plain, own in zip(measured.spread, calibration.pace_spread, strict=True)
    )
    return replace(
        judged(known, seconds, low, high, over=OVER, under=UNDER),
        timed=True,
        fast_peak=max(one.peak_bytes for one in steps)
        + sizing.small_bytes
        + training.chunks.most_kept,
        file_peak=_file_bytes(sizing.spill_bytes, training.pager),
        stall_s=stall,
        own_s=parts["own work"],
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        bound=max(parts, key=lambda name: parts[name]),
    )


def _mean(steps: Sequence[StepResult], key: str) -> float:
    return sum(float(getattr(step, key)) for step in steps) / len(steps)


def _file_bytes(need: int, pager: SimulatedPager) -> int:
    """Return the size of the spill file, created with ``need`` bytes and grown for its regions."""
    size = max(pager.file_bytes, need + pager.most_extra if pager.most_extra else 0)
    return need if size <= need else grown(size)
