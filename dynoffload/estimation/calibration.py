"""What an estimate knows of a machine: its link, and what the runtime's own work takes on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dynoffload.doctor.tiers import measure_tiers
from dynoffload.errors import ConfigError
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.own_work import Work

_SECONDS = 0.3  # of each measurement of the link
# As fitted in docs/results/simulation.json, on two cores of a virtual machine.
_SHIPPED = Work(save_s=3.6e-5, update_s=1.2e-3, plan_s=3.3e-5, copy_s=1.4e-10)
_LATENCY = 4.9e-4  # seconds of a transfer that somebody waits for


@dataclass(frozen=True)
class Calibration:
    """A machine and the runtime on it.

    Attributes:
        machine: its link and what transfers cost compute; the budget says how much fast memory.
        work: what the runtime itself takes.
        said: where that is from.
    """

    machine: Machine
    work: Work
    said: str

    @classmethod
    def of_link(cls, directory: str | Path) -> Calibration:
        """Measure the link to ``directory`` now; what the runtime itself takes is as shipped.

        Raises:
            SpillError: the directory cannot be used.
        """
        tiers = measure_tiers(directory, _SECONDS)
        link = Link(tiers.read_bps, tiers.write_bps, tiers.mixed_bps, latency_s=_LATENCY)
        return cls(
            Machine(link, fast_bytes=1),
            _SHIPPED,
            "the link is measured; what the runtime itself takes is that of the machine it was "
            "fitted on (--calibration takes this machine's)",
        )

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Return what ``dynoffload experiment simulation --json PATH`` has fitted.

        Raises:
            ConfigError: the file is none of those.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            link = Link(**found["link"])
            machine = Machine(link, fast_bytes=1, interference=found["interference"])
            work = Work(**{one.name: float(found["work"][one.name]) for one in fields(Work)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no calibration ({type(error).__name__}: {error}): make one by "
                "'dynoffload experiment simulation --json PATH'"
            ) from error
        return cls(machine, work, f"link and the runtime's own work as fitted in {path}")
