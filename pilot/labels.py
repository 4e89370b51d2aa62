"""Labels: compact training data extracted from traces; thousands fit in memory.

`label_traces` reads every trace of a directory once, in worker processes, and returns a `Label` of
each. `encode_example` converts a label to an `Example`. A label has no order of blocks, since which
calls are blocks depends on all traces together.
"""

from __future__ import annotations

import hashlib
import platform
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from dynoffload.errors import DynOffloadError, TraceError
from dynoffload.pilot.features import BlockHint, Example
from dynoffload.pilot.progress import Report
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.calls import CallSummary, summarize_calls
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingHint
from dynoffload.profiler.storage import check_network, load_trace, trace_files

NAMED = 3
"""The most unreadable traces that an error names, each with its reason."""
FEW = 24
"""Up to this many traces are labelled in this process, faster than starting workers."""


@dataclass(frozen=True, eq=False)
class Label:
    """Training data from one trace.

    Attributes:
        calls: its calls, their costs and the regions.
        sample: input features, known before the step.
        hints: the network's routing hints.
        digest: SHA-256 of the trace file.
    """

    calls: CallSummary
    sample: InputFeatures
    hints: tuple[RoutingHint, ...]
    digest: str

    @property
    def source(self) -> str:
        """The file or document the sample came from."""
        return self.calls.source


def label_traces(traces: str | Path, jobs: int | None, report: Report) -> list[Label]:
    """Return the label of every trace of a directory, in order of step, then of file name.

    Args:
        traces: directory that `dynoffload profile` wrote; its ``*.trace`` files are read.
        jobs: processes, as `run_tasks` takes them; all must see the traces under the same path.
        report: receives progress.

    Raises:
        TraceError: if there is no trace, some cannot be read, or they are of several networks.
    """
    paths = [path.resolve() for path in trace_files(traces)]
    made: dict[int, Label | str] = {}
    report("labelling traces", 0, len(paths))
    jobs = jobs if len(paths) > FEW else 1
    for number, label in run_tasks(make_label, [(str(path),) for path in paths], jobs):
        made[number] = label
        report("labelling traces", len(made), len(paths))
    found = [made[number] for number in range(len(paths))]
    labels = [one for one in found if isinstance(one, Label)]
    refused = [one for one in found if isinstance(one, str)]
    if refused:
        more = f"; and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
        reasons = f"{'; '.join(refused[:NAMED])}{more}"
        some = f"{len(refused)} of {len(paths)} traces give no label: " if len(refused) > 1 else ""
        raise TraceError(some + reasons)
    for path, one in zip(paths, labels, strict=True):
        check_network(paths[0], labels[0].calls.network, path, one.calls.network)
    return sorted(labels, key=lambda label: label.calls.step)


def make_label(path: str) -> Label | str:
    """Return the label of a trace file, or the error as text; called in worker processes."""
    try:
        trace = load_trace(Path(path))  # refuses files that are too large
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Label(summarize_calls(trace), trace.sample, tuple(trace.hints), digest)
    except DynOffloadError as error:
        return str(error)
    except OSError as error:
        return (
            f"{path}: cannot be read on {platform.node()} ({error.strerror}); workers must find "
            "the traces under the same path"
        )


def encode_example(vocabulary: Vocabulary, label: Label) -> Example:
    """Return the training example of a label."""
    order = vocabulary.encode(label.calls)
    calls = [call for call, _ in order]
    hints = [placed_hint(vocabulary, one, bisect_right(calls, one.call)) for one in label.hints]
    return Example(label.sample, [block for _, block in order], label.source, hints)


def placed_hint(vocabulary: Vocabulary, hint: RoutingHint, place: int) -> BlockHint:
    """Return a hint in blocks of the vocabulary: those of its modules, or all within these.

    Args:
        vocabulary: the blocks.
        hint: the hint.
        place: number of blocks that had begun when it was given.
    """
    pairs = [
        (block, value)
        for path, value in zip(hint.blocks, hint.values, strict=True)
        for block in vocabulary.within(path)
    ]
    return BlockHint(place, tuple(b for b, _ in pairs), tuple(v for _, v in pairs))
