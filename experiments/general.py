"""Trains the general pilot that comes with the package, on all networks that it may learn from.

Its file is `dynoffload/pilot/general.safetensors`. What it is worth on networks that it has not
seen is measured by the experiment ``ablation``, which leaves out whole families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room
from dynoffload.experiments.harness import Cell, Experiment, Row, option
from dynoffload.experiments.material import EARLY, Material
from dynoffload.experiments.provenance import provenance
from dynoffload.experiments.watched import MATERIAL
from dynoffload.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    out: Path = option(Path("general.safetensors"), "file of the pilot", place=True)
    seeds: int = option(3, "how many, from 0")
    watched: int = option(320, "steps of each network, fewer where they are slow")
    material: int = option(len(MATERIAL), "architectures of transformers to learn from, at most")
    jobs: int = option(-1, "processes that watch and train; -1 for one per core")
    folder: Path | None = option(
        None, "where watched steps are kept for another run of the same code", place=True
    )

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.watched <= EARLY:
            raise ConfigError(
                f"seeds={self.seeds} and watched={self.watched} are too few: take at least 1 and "
                f"{EARLY + 1}"
            )


class GeneralPilot(Experiment[Params]):
    """The one case is the training."""

    parameters = Params
    title = "the general pilot"

    def cases(self) -> Mapping[str, None]:
        make_room(self.params.out, "--out")
        return {"training": None}

    def run(self, case: None) -> Row:
        own, begun, made = self.params, perf_counter(), provenance()
        material = Material(own.seeds, own.watched, own.material, own.jobs, own.folder, self.report)
        card = {"steps": own.watched, "command": made["command"], "commit": made["commit"]}
        material.general(card).save(own.out)
        return {
            "networks": material.names,
            "seconds": perf_counter() - begun,
            "nbytes": own.out.stat().st_size,
        }


_COLUMNS: dict[str, Cell] = {
    "": lambda row: row["case"],
    "networks": lambda row: str(len(row["networks"])),
    "file": lambda row: format_bytes(row["nbytes"]),
    "took": lambda row: format_seconds(row["seconds"]),
}
GeneralPilot.columns = _COLUMNS
