"""What an estimate tells: memory by tier, bytes moved, seconds, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

OVER, UNDER = 0.18, 0.26
"""How far estimates of a step lay above and below real ones: docs/results/estimates.md."""
_DISTURBED = 0.25  # of a step, by which its repeats may differ


@dataclass(frozen=True)
class Estimate:
    """What a training would take; bytes and seconds.

    Attributes:
        model: its class.
        budget: of fast memory.
        feasible: whether it can be trained under that.
        reason: why not, and what would be enough; "" if it can.
        least: the least budget that is enough, where this one is too small; else 0.
        timed: whether bytes moved and seconds under the budget are estimated; if not,
            ``assumptions`` say why.
        parameters: bytes of them, and of buffers.
        gradients: bytes.
        optimizer: bytes of its state.
        activations: bytes that the largest step measured saves for backward.
        staging: bytes of fast memory for what comes and goes: chunks that are filled, and reserve.
        temporaries: bytes of what operators make and do not save, beside the budget.
        fast_peak: most bytes that the runtime holds in fast memory.
        file_peak: bytes of the spill file.
        resident: all fits, so that nothing is paged.
        plain_s: mean seconds of a plain step.
        step_s: mean seconds of a step under the budget.
        step_low_s, step_high_s: the range of ``step_s``: the spread of the probe's repeats, and
            how far estimates lay off where they were compared with real trainings.
        spread: share of ``step_s`` by which the probe's repeats differ.
        stall_s: of those, waiting for the file tier.
        own_s: of those, the runtime's own work.
        bytes_in: read in a step.
        bytes_out: written in a step.
        bound: what takes longest: "compute", "own work", or what is waited for, "reads" or
            "writes", by which of them takes longer.
        faster_link_s: seconds of a step were the link twice as fast.
        assumptions: what the numbers stand on.
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
    faster_link_s: float = 0.0
    assumptions: tuple[str, ...] = ()


def with_note(known: Estimate, note: str) -> Estimate:
    """Return ``known`` with another assumption."""
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
        seconds: estimated.
        low, high: by the spread of the probe's repeats.
        over, under: shares by which an estimate may lie above or below what is real.
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
