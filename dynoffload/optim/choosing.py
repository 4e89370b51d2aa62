"""Where updates are computed, chosen by what this machine does: the kernel's rate and the link's.

The host needs a gradient out and a parameter in, twice two bytes an element in half precision, and
its kernel; the accelerator needs masters and moments in and out, twice twelve bytes for Adam. Both
are bytes over rates (ZeRO-Offload, section 3.1, gives the first count); the copies of one direction
run beside those of the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.memory.accelerator.queues import Queues
from dynoffload.optim.crew import Crew
from dynoffload.optim.rules import Part, Rule
from dynoffload.optim.shelves import Entry
from dynoffload.units import MiB, format_bytes, format_seconds

logger = logging.getLogger(__name__)

_ELEMENTS = 1 << 22  # of the piece that the kernel is timed on
_COPY = 32 * MiB
_REPEATS = 3


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Attributes:
        elements_per_s: that the host's kernel updates.
        in_bytes_per_s, out_bytes_per_s: over the link, one direction alone.
        both_bytes_per_s: in each direction while the other is in use.
    """

    elements_per_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class Plan:
    """Where updates are computed, and why.

    Attributes:
        place: ``"host"`` or ``"device"``.
        reason: in words.
        rates: what was measured; None where the place was given.
        host_s: seconds of a step on the host, by the rates: gradients out, then the longer of
            kernel and upload; nan where nothing was measured.
        device_s: of a step on the accelerator: the longer of masters and moments in and out; or
        nan.
    """

    place: str
    reason: str
    rates: Rates | None = None
    host_s: float = float("nan")
    device_s: float = float("nan")


def plan_by(rates: Rates, entries: Sequence[Entry]) -> Plan:
    """Return the place at which the updates of ``entries`` take less time."""
    elements = sum(entry.numel for entry in entries)
    parameters = sum(entry.parameter.nbytes for entry in entries)
    states = sum(4 * entry.numel * len(entry.keys) for entry in entries)
    host_s = parameters / rates.out_bytes_per_s + max(
        elements / rates.elements_per_s, parameters / rates.in_bytes_per_s
    )
    device_s = states / rates.both_bytes_per_s
    place = "host" if host_s <= device_s else "device"
    reason = (
        f"the host's kernel updates {rates.elements_per_s / 1e6:.0f} million elements/s, the link "
        f"takes {format_bytes(rates.in_bytes_per_s)}/s in, {format_bytes(rates.out_bytes_per_s)}/s "
        f"out and {format_bytes(rates.both_bytes_per_s)}/s each way at once: "
        f"{format_seconds(host_s)} a step on the host, {format_seconds(device_s)} streamed through "
        "the accelerator"
    )
    return Plan(place, reason, rates, host_s, device_s)


def measure(queues: Queues, rule: Rule, crew: Crew, group: Mapping[str, Any]) -> Rates:
    """Return the rates of this machine, in a second or less.

    Args:
        queues: of the accelerator.
        rule: whose kernel is timed.
        crew: that runs it.
        group: hyperparameters.
    """
    kernel_s = crew.do(_time_kernel, rule, group)
    into, out, both = _time_link(queues)
    return Rates(_ELEMENTS / kernel_s, _COPY / into, _COPY / out, _COPY / both)


def _best(act: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def _time_kernel(rule: Rule, group: Mapping[str, Any]) -> float:
    """Return the seconds in which `_ELEMENTS` are read, updated and rounded."""
    half = torch.zeros(_ELEMENTS, dtype=torch.bfloat16)
    wide, master = torch.zeros(_ELEMENTS), torch.zeros(_ELEMENTS)
    moments = {key: torch.zeros(_ELEMENTS) for key in rule.moments(group)}
    values = rule.hyperparameters(group)

    def act() -> None:
        wide.copy_(half)
        rule.run([Part(master, wide, moments, 1.0, values)])
        half.copy_(master)

    return _best(act)


def _time_link(queues: Queues) -> tuple[float, float, float]:
    """Return the seconds in which `_COPY` bytes go in, out, and in while as many go out."""
    hosts = [queues.host(_COPY) for _ in range(2)]
    there: list[torch.UntypedStorage] = []
    try:
        for _ in range(2):
            storage = torch.UntypedStorage(0, device=queues.device)  # type: ignore[no-untyped-call]
            queues.fill(storage, _COPY)
            there.append(storage)

        def go(*, into: bool, out: bool) -> None:
            now = [queues.now()]
            moments = []
            if into:
                moments.append(queues.copy_in(there[0], hosts[0], now))
            if out:
                moments.append(queues.copy_out(hosts[1], there[1], now))
            for moment in moments:
                moment.wait()
                queues.after(moment)

        took = tuple(
            _best(lambda into=into, out=out: go(into=into, out=out))  # type: ignore[misc]
            for into, out in ((True, False), (False, True), (True, True))
        )
        return took[0], took[1], took[2]
    finally:
        for storage in there:
            queues.empty(storage)
        for host in hosts:
            queues.release(host, held=False)
