"""Labelling: every trace of a directory made into what a pilot learns from, once.

`label_traces` keeps each label in a directory as soon as it is made, so that a job that was killed
goes on where it was.

[Note: which labels are valid]
A label's key is the digest of the trace's name, size and time of change, of the budget and of the
code that makes labels. Another trace under the name, another budget or another release gives
another key, and the trace is labelled anew. Labels are written under another name and then moved,
carry a checksum, and hold no code; a damaged one is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynoffload.errors import TraceError
from dynoffload.pilot.artifact import write_whole
from dynoffload.pilot.labels import (
    BadLabelError,
    Label,
    Refused,
    make_label,
    makers_version,
    read_label,
)
from dynoffload.pilot.progress import Report
from dynoffload.pilot.workers import run_tasks
from dynoffload.profiler.storage import trace_files

logger = logging.getLogger(__name__)

NAMED = 3
"""Traces that cannot be read and are named, each with its reason."""
FEW = 24
"""Traces that this process labels itself: sooner done than workers are started."""
_SUFFIX = ".label"


@dataclass(frozen=True)
class Labelled:
    """The labels of a directory.

    Attributes:
        labels: in order of step, then of file name.
        there: how many an earlier run had made.
    """

    labels: list[Label]
    there: int


def label_traces(
    traces: str | Path,
    jobs: int | None,
    report: Report,
    *,
    budget: int | None = None,
    keep: Path | None = None,
) -> Labelled:
    """Label every trace of a directory.

    Args:
        traces: directory that `dynoffload profile` wrote; its ``*.trace`` files are read.
        jobs: processes, as `run_tasks` takes them, which find the traces under the same path.
        report: told how far it is.
        budget: bytes to plan each trace under; None for no plan.
        keep: directory in which labels are kept, and looked for; None to keep none.

    Raises:
        TraceError: if there is no trace, some cannot be read, or they are of several networks.
    """
    paths = [path.resolve() for path in trace_files(traces)]
    keys = [_key(path, budget) for path in paths]
    labels: list[Label | None] = [None] * len(paths)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for number, (path, key) in enumerate(zip(paths, keys, strict=True)):
            labels[number] = _look_up(keep / (path.name + _SUFFIX), key)
            report("looking for labels", number, len(paths))
    missing = [number for number, label in enumerate(labels) if label is None]
    there = len(paths) - len(missing)
    doing = "labelling traces"
    if there:
        logger.info("%d of %d labels were there", there, len(paths))
        doing = f"labelling traces ({there} of {len(paths)} labels were there)"
    report(doing, there, len(paths))
    refused: dict[int, str] = {}
    makers = makers_version()
    tasks = [(str(paths[number]), keys[number], budget, makers) for number in missing]
    jobs = jobs if len(tasks) > FEW else 1
    if tasks:
        for done, (place, made) in enumerate(run_tasks(make_label, tasks, jobs), start=1):
            number = missing[place]
            if isinstance(made, Refused):
                refused[number] = made.reason
            else:
                labels[number] = read_label(made, keys[number])
                if keep is not None:
                    write_whole(keep / (paths[number].name + _SUFFIX), made)
            report(doing, there + done, len(paths))
    if refused:
        raise TraceError(_complaint([refused[number] for number in sorted(refused)], len(paths)))
    whole = [label for label in labels if label is not None]
    _check_networks(paths, whole)
    return Labelled(sorted(whole, key=lambda label: label.outline.step), there)


def forget(keep: Path) -> None:
    """Remove the labels in a directory, also half of one that a kill has left, and the directory if
    nothing else is in it."""
    for path in keep.glob(f"*{_SUFFIX}*"):
        path.unlink(missing_ok=True)
    if keep.is_dir() and not any(keep.iterdir()):
        shutil.rmtree(keep, ignore_errors=True)


def _key(path: Path, budget: int | None) -> str:
    """Return what a trace's label is known by; see [Note: which labels are valid]."""
    try:
        found = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: no trace can be read there ({error.strerror})") from error
    known = [path.name, found.st_size, found.st_mtime_ns, budget, makers_version()]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _look_up(path: Path, key: str) -> Label | None:
    try:
        return read_label(path.read_bytes(), key)
    except (OSError, BadLabelError):
        return None


def _complaint(reasons: Sequence[str], total: int) -> str:
    if len(reasons) == 1:
        return reasons[0]
    named = "; ".join(reasons[:NAMED])
    more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return f"{len(reasons)} of {total} traces give no label: {named}{more}"


def _check_networks(paths: Sequence[Path], labels: Sequence[Label]) -> None:
    first = labels[0].outline.network
    for path, label in zip(paths, labels, strict=True):
        if label.outline.network != first:
            raise TraceError(
                f"{paths[0]} is of network {first[:12]}, {path.name} of "
                f"{label.outline.network[:12]}: keep the traces of each network in their own "
                "directory"
            )
