"""Calibration of estimates to a machine: its link, and the runtime's overhead on it.

The link, the time the kernel takes to move pages, and the runtime's pace are measured each time,
since a shared machine changes from hour to hour. The runtime's cost per operation (per saved
tensor, per update) is fitted once and scaled by the pace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynoffload.doctor import measure_moves, measure_tiers
from dynoffload.errors import ConfigError
from dynoffload.estimation.overhead_probe import probe_overhead
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.overhead import COSTS, RuntimeOverhead
from dynoffload.units import MiB

_SECONDS, _FILE_BYTES = 0.3, 512 * MiB  # of each measurement of the link
_MAKE = "make one by 'dynoffload experiment simulation --json PATH'"


@dataclass(frozen=True)
class Calibration:
    """A machine and the runtime's overhead on it.

    Attributes:
        machine: its link and interference; the budget sets its fast memory.
        work: the runtime's own costs.
        said: text: where ``work`` is from.
        pace_s: seconds that `probe_overhead` measured.
        pace_spread: least and most of its rounds, as shares of ``pace_s``.
    """

    machine: Machine
    work: RuntimeOverhead
    said: str
    pace_s: float
    pace_spread: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Fitted:
    """Fitted costs of the runtime, to be scaled to another time or machine.

    Attributes:
        machine: the latencies of its link, and its interference.
        work: the runtime's own costs, ...
        pace_s: ... on a machine where `probe_overhead` measures this many seconds.
        where: text: where it was fitted.
    """

    machine: Machine
    work: RuntimeOverhead
    pace_s: float
    where: str = ""

    @classmethod
    def of(cls, path: str | Path | None) -> Fitted:
        """Read what ``dynoffload experiment simulation --json PATH`` wrote; None: the shipped one.

        Raises:
            ConfigError: the file is not such a calibration.
        """
        if path is None:
            return _SHIPPED
        try:
            written: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            fitted = _fitted(written.get("summary", written), f"in {path}")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror or error}): {_MAKE}"
            ) from error
        except KeyError as error:
            raise ConfigError(f"{path} is no calibration: {error} is not in it: {_MAKE}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no calibration ({error}): {_MAKE}") from error
        if not (0 < fitted.pace_s < math.inf):
            raise ConfigError(f"{path} is no calibration (pace_s is {fitted.pace_s}): {_MAKE}")
        return fitted

    def on(self, link: Link) -> Machine:
        """Return the machine with the bandwidths of ``link``."""
        own = self.machine.link
        link = replace(link, latency_s=own.latency_s, fault_s=own.fault_s)
        return replace(self.machine, link=link)

    def at(self, pace_s: float, moves: Mapping[int, float]) -> RuntimeOverhead:
        """Return the runtime's own costs at another pace."""
        return replace(self.work.times(pace_s / self.pace_s), moves=moves)

    def measured(self, directory: str | Path) -> Calibration:
        """Measure the link to ``directory``, the time to move pages, and the runtime's pace.

        Raises:
            BackendError: the system refuses the pager, or is too busy to measure the pace.
            SpillError: the directory cannot be used.
        """
        tiers = measure_tiers(directory, _SECONDS, file_bytes=_FILE_BYTES)
        pace = probe_overhead(directory)
        said = (
            "the disk was measured now; dynoffload's own overhead was fitted "
            f"{self.where}, and is scaled by {pace.seconds / self.pace_s:.2g}, as a probe took here"
        )
        return Calibration(
            self.on(Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps)),
            self.at(pace.seconds, measure_moves(directory)),
            said,
            pace.seconds,
            (pace.least, pace.most),
        )


def _fitted(found: Mapping[str, Any], where: str) -> Fitted:
    latency, fault = (float(found["link"][key]) for key in ("latency_s", "fault_s"))
    machine = Machine(
        Link(1.0, 1.0, 2.0, latency, fault), 1, interference=float(found["interference"])
    )
    costs: dict[str, Any] = {key: float(found["work"][key]) for key in COSTS}
    return Fitted(machine, RuntimeOverhead(**costs), float(found["pace_s"]), where)


# As fitted in docs/results/simulation.json, on two cores of a virtual machine.
_SHIPPED = _fitted(
    {
        "work": {
            "visit_s": 3.84e-05,
            "save_s": 4.93e-05,
            "ask_s": 1.74e-05,
            "update_s": 0.000627,
            "settle_s": 0.000157,
            "plan_s": 1.44e-05,
            "copy_s": 3.04e-10,
        },
        "link": {"latency_s": 0.000561, "fault_s": 3.15e-06},
        "interference": 0.264,
        "pace_s": 0.0406,
    },
    "on another machine (--calibration takes this one's)",
)
