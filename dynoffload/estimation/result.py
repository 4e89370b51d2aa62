"""The result of an estimate: memory by tier, bytes moved, seconds, and their uncertainty."""

from __future__ import annotations

from dataclasses import dataclass, replace

OVER, UNDER = 0.18, 0.26
"""Largest errors of step estimates, above and below real steps: docs/results/estimates.md."""
_DISTURBED = 0.25  # spread of a step's repeats, as a share, above which there is a warning


@dataclass(frozen=True)
class Estimate:
    """Estimate of a training run, in bytes and seconds.

    Attributes:
        model: class name of the model.
        budget: bytes of fast memory.
        feasible: whether it can be trained under the budget.
        reason: why not, and which budget would be enough; "" if feasible.
        least: the least budget that is enough, if this one is too small; else 0.
        timed: whether bytes moved and seconds under the budget are estimated; if not,
            ``assumptions`` say why.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer: bytes of optimizer state.
        activations: most bytes that a measured step saves for backward.
        staging: bytes of fast memory for chunks being filled and for the reserve.
        temporaries: peak bytes of activations that are not saved, in addition to the budget.
        fast_peak: most bytes that the runtime holds in fast memory.
        file_peak: bytes of the spill file.
        resident: whether everything fits, so that nothing is paged.
        plain_s: mean seconds of a plain step.
        step_s: mean seconds of a step under the budget.
        step_low_s, step_high_s: the range of ``step_s``: the spread of the probe's repeats, and
            the known errors of estimates against real training.
        spread: share of ``step_s`` by which the probe's repeats differ.
        stall_s: seconds of ``step_s`` spent waiting for the file tier.
        own_s: seconds of ``step_s`` spent in the runtime's own work.
        bytes_in: bytes read per step.
        bytes_out: bytes written per step.
        bound: the largest part of a step: "compute", "own work", or stalls, called "reads" or
            "writes" by which of them takes longer.
        assumptions: assumptions behind the numbers.
    """

    model: str
    budget: int
    feasible: bool
    reason: str = ""
    least: int = 0
    timed: bool = False
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    staging: int = 0
    temporaries: int = 0
    fast_peak: int = 0
    file_peak: int = 0
    resident: bool = False
    plain_s: float = 0.0
    step_s: float = 0.0
    step_low_s: float = 0.0
    step_high_s: float = 0.0
    spread: float = 0.0
    stall_s: float = 0.0
    own_s: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    bound: str = ""
    assumptions: tuple[str, ...] = ()


def with_note(known: Estimate, note: str) -> Estimate:
    """Return ``known`` with one more assumption."""
    return replace(known, assumptions=(*known.assumptions, note))


def judged(
    known: Estimate,
    seconds: float,
    low: float,
    high: float,
    *,
    over: float = 0.0,
    under: float = 0.0,
) -> Estimate:
    """Return ``known`` with the seconds of a step, their range, and a warning if the probe was
    disturbed.

    Args:
        seconds: estimated seconds.
        low, high: their range by the spread of the probe's repeats.
        over, under: shares by which an estimate may be above or below the real value.
    """
    spread = (high - low) / seconds if seconds else 0.0
    known = replace(
        known,
        step_s=seconds,
        step_low_s=low / (1 + over),
        step_high_s=high / (1 - under),
        spread=spread,
    )
    if spread <= _DISTURBED:
        return known
    return with_note(
        known,
        f"the probe was disturbed: its repeats differ by more than {_DISTURBED:.0%}, as when other "
        "programs use the machine; estimate again when it is idle",
    )
