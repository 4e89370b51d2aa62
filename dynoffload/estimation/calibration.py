"""What an estimate knows of a machine: its link, and what the runtime's own work takes on it.

The link, how long the kernel takes to move pages, and how quick the runtime's own work is are
measured each time: a machine that others use too is not the same from hour to hour. What that work
takes, saved tensor by saved tensor and update by update, is fitted once, and scaled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
class Fitted:
    """What the runtime itself takes, as it was fitted.

    Attributes:
        work: seconds, by the fields of `RuntimeOverhead` that are fitted.
        latency_s: of a transfer.
        fault_s: of an access that waits for one.
        interference: see `Machine`.
        pace_s: what `probe_overhead` said then.
        where: it was fitted.
    """

    work: Mapping[str, float]
    latency_s: float
    fault_s: float
    interference: float
    pace_s: float
    where: str

    @classmethod
    def of(cls, path: str | Path | None) -> Fitted:
        """Read what ``dynoffload experiment simulation --json PATH`` wrote; as shipped without it.

        Raises:
            ConfigError: the file is none of those.
        """
        return _SHIPPED if path is None else _load(Path(path))

    def on(self, directory: str | Path) -> Calibration:
        """Measure the link to ``directory`` now, how pages move, and the runtime's pace.

        Raises:
            BackendError: the system refuses the pager, or is too busy to tell the pace.
            SpillError: the directory cannot be used.
        """
        tiers = measure_tiers(directory, _SECONDS, file_bytes=_FILE_BYTES)
        link = Link(
            tiers.read_bps,
            tiers.write_bps,
            tiers.mixed_bps,
            latency_s=self.latency_s,
            fault_s=self.fault_s,
        )
        pace = probe_overhead(directory)
        factor = pace.seconds / self.pace_s
        said = (
            "the disk was measured now; dynoffload's own overhead was fitted "
            f"{self.where}, and is scaled by {factor:.2g}, as a probe took here"
        )
        return Calibration(
            Machine(link, fast_bytes=1, interference=self.interference),
            RuntimeOverhead(**self.work, moves=measure_moves(directory)).times(factor),
            said,
            pace.seconds,
            (pace.least, pace.most),
        )


# As fitted in docs/results/simulation.json, on two cores of a virtual machine.
_SHIPPED = Fitted(
    {
        "visit_s": 3.84e-05,
        "save_s": 4.93e-05,
        "ask_s": 1.74e-05,
        "update_s": 0.000627,
        "draft_s": 0.00041,
        "settle_s": 0.000157,
        "plan_s": 1.44e-05,
        "copy_s": 3.04e-10,
    },
    latency_s=0.000561,
    fault_s=3.15e-06,
    interference=0.264,
    pace_s=0.0406,
    where="on another machine (--calibration takes this one's)",
)


@dataclass(frozen=True)
class Calibration:
    """A machine and the runtime on it.

    Attributes:
        machine: its link and what transfers cost compute; the budget says how much fast memory.
        work: what the runtime itself takes.
        said: where that is from.
        pace_s: what `probe_overhead` says there.
        pace_spread: the least and the most of its rounds, as shares of it.
    """

    machine: Machine
    work: RuntimeOverhead
    said: str
    pace_s: float
    pace_spread: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, directory: str | Path, fitted: str | Path | None = None) -> Calibration:
        """Measure the link to ``directory`` now, how pages move, and the runtime's pace.

        Args:
            directory: where the spill file will lie.
            fitted: what ``dynoffload experiment simulation --json PATH`` wrote on this machine, for
                what the runtime itself takes; as shipped without it.

        Raises:
            BackendError: the system refuses the pager, or is too busy to tell the pace.
            ConfigError: the file is none of those.
            SpillError: the directory cannot be used.
        """
        return Fitted.of(fitted).on(directory)


def _load(path: Path) -> Fitted:
    try:
        written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = written.get("summary", written)
        work = {key: float(found["work"][key]) for key in COSTS}
        fitted = Fitted(
            work,
            float(found["link"]["latency_s"]),
            float(found["link"]["fault_s"]),
            float(found["interference"]),
            float(found["pace_s"]),
            f"in {path}",
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): {_MAKE}") from error
    except KeyError as error:
        raise ConfigError(
            f"{path} is no calibration, or an old one: {error} is not in it: {_MAKE}"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no calibration ({error}): {_MAKE}") from error
    if not (0 < fitted.pace_s < math.inf):
        raise ConfigError(f"{path} is no calibration (pace_s is {fitted.pace_s}): {_MAKE}")
    return fitted
