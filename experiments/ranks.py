"""Two processes on different paths: whether they train to the bits of the same run without a block.

What it is: networks whose ranks run other layers or experts at every step, spread over processes of
this machine, each under a budget of its own; and the death of one rank, with what the other says
and how soon it ends. What it is not: a measure of scaling, as the processes share this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import write_json
from dynoffload.experiments.workers import WorkerError
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dynoffload.experiments.ranks_child import Task

_SAID = 2_000
_POLL_S = 0.02


def run(
    json_path: Path | None = None,
    *,
    ways: Sequence[str] = (),
    networks: Sequence[str] = (),
    steps: int = 200,
    ranks: int = 2,
    share: float = 0.3,
    timeout: float = 20.0,
    patience: float = 1800.0,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Train in several processes, with and without a block, and kill one.

    Args:
        json_path: what there is so far is written here after each row.
        ways: how models are spread over ranks; all by default.
        networks: what is trained; all by default.
        steps: of each training.
        ranks: processes.
        share: of parameters, gradients and optimizer state, which a rank's budget allows beside
            what the way keeps in memory, such as buckets.
        timeout: seconds that a rank may keep the others waiting.
        patience: seconds after which the processes of one training are ended.
        spill_dir: where files lie.

    Returns:
        A row for each way and network, and one for each way in which a rank dies.

    Raises:
        ConfigError: there is no such way or network, or fewer than two ranks.
        WorkerError: a rank failed, or took too long.
    """
    from dynoffload.experiments.ranks_child import NETWORKS, WAYS, Task

    for given, known, what in ((ways, WAYS, "way"), (networks, NETWORKS, "network")):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"no {what} is named {unknown[0]!r}; there are {', '.join(known)}")
    if ranks < 2 or steps < 2:
        raise ConfigError(f"ranks={ranks} and steps={steps} must be at least 2")
    result: dict[str, Any] = {
        "steps": steps, "ranks": ranks, "share": share, "timeout_s": timeout,
        "trainings": [], "deaths": [],
    }  # fmt: skip
    chosen = [(way, name) for way in ways or WAYS for name in networks or NETWORKS]
    where = "" if spill_dir is None else str(spill_dir)
    with progress_bar(True) as report:
        for at, (way, name) in enumerate(chosen):
            report(f"{name} by {way}", at, 2 * len(chosen))
            task = Task(way, name, 0, ranks, "", steps, share, timeout, spill_dir=where)
            result["trainings"].append(_trained(task, patience))
            if json_path is not None:
                write_json(json_path, result)
        for at, (way, name) in enumerate(chosen):
            report(f"a rank of {name} by {way} dies", len(chosen) + at, 2 * len(chosen))
            few = min(steps, 10)
            task = Task(
                way, name, 0, ranks, "", few, share, timeout, dies=few // 2, spill_dir=where
            )
            result["deaths"].append(_died(task, patience))
            if json_path is not None:
                write_json(json_path, result)
    _print(result)
    return result


class _Ranks:
    """The processes of one task."""

    def __init__(self, task: Task, directory: Path) -> None:
        command = [sys.executable, "-P", "-m", "dynoffload.experiments.ranks_child"]
        self.said = [(directory / f"{rank}.err").open("w+") for rank in range(task.size)]
        self.processes = []
        for rank, said in enumerate(self.said):
            mine = {**asdict(task), "rank": rank, "store": str(directory / "store")}
            self.processes.append(
                subprocess.Popen(
                    [*command, json.dumps(mine)], stdout=subprocess.PIPE, stderr=said, text=True
                )
            )

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, said in zip(self.processes, self.said, strict=True):
            process.kill()
            process.wait()
            said.close()

    def errors(self, rank: int) -> str:
        """Return what a rank has said on its error stream."""
        self.said[rank].seek(0)
        return self.said[rank].read()

    def ends(self, patience: float, what: str, *, well: bool) -> list[float]:
        """Wait for all to end, and return when each did.

        Args:
            patience: seconds.
            what: messages call the task.
            well: all have to end well; the first that does not is an error at once.

        Raises:
            WorkerError: one has failed, or it took too long.
        """
        until = time.monotonic() + patience
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes):
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic()
                    if well and process.returncode:
                        said = self.errors(rank).strip()[-_SAID:]
                        raise WorkerError(
                            f"rank {rank} of {what} ended with code {process.returncode}: {said}"
                        )
            if time.monotonic() > until:
                raise WorkerError(f"{what} took over {patience:g} s")
            time.sleep(_POLL_S)
        return [ended[rank] for rank in sorted(ended)]


def _trained(task: Task, patience: float) -> dict[str, Any]:
    """Return the row of one training."""
    what = f"{task.network} by {task.way}"
    with tempfile.TemporaryDirectory() as directory, _Ranks(task, Path(directory)) as ranks:
        ranks.ends(patience, what, well=True)
        answers = []
        for rank, process in enumerate(ranks.processes):
            printed = process.communicate()[0]
            if not printed:
                raise WorkerError(f"rank {rank} of {what} has printed nothing")
            answers.append(json.loads(printed.splitlines()[-1]))
    return {
        "way": task.way,
        "network": task.network,
        "exact": all(one["plain"] == one["paged"] for one in answers),
        "kept": all(one["peak_fast_bytes"] <= one["budget"] for one in answers),
        "ranks": answers,
    }


def _died(task: Task, patience: float) -> dict[str, Any]:
    """Return the row of a training in which the last rank dies."""
    what = f"{task.network} by {task.way}, of which a rank dies,"
    with tempfile.TemporaryDirectory() as directory, _Ranks(task, Path(directory)) as ranks:
        ends = ranks.ends(patience, what, well=False)
        lines = ranks.errors(0).splitlines()
        code = ranks.processes[0].returncode
    words = [line.partition("RankError: ")[2] for line in lines if "RankError: " in line]
    return {
        "way": task.way,
        "network": task.network,
        "seconds": ends[0] - ends[-1],
        "within": ends[0] - ends[-1] <= task.timeout_s,
        "code": code,
        "words": words[-1] if words else "",
        "said": "" if words else "\n".join(lines)[-_SAID:],
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{result['ranks']} ranks, {result['steps']} steps, in a block and without",
        caption="of the first rank; seconds are medians of the steps of one run",
        title_justify="left",
        caption_justify="left",
        box=None,
    )
    for header in ("training", "bits"):
        table.add_column(header, no_wrap=True)
    for header in ("states", "budget", "read", "a step", "plain"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in result["trainings"]:
        first = row["ranks"][0]
        table.add_row(
            f"{row['network']}, {row['way']}",
            "the same" if row["exact"] else "DIFFER",
            *(format_bytes(first[key]) for key in ("whole_bytes", "budget", "bytes_in")),
            format_seconds(first["paged_s"]),
            format_seconds(first["plain_s"]),
        )
    console.print(table)
    for row in result["deaths"]:
        console.print(
            f"{row['network']} by {row['way']}: after the last rank was killed, the first ended "
            f"within {row['seconds']:.1f} s, code {row['code']}: {row['words'] or row['said']}",
            markup=False,
            highlight=False,
        )
