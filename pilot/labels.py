"""Labels: what a pilot learns from one trace, small enough to keep thousands of.

`Label` is the outline of a trace's program with its sample, its hints and, under a budget, its
plan; `make_label` reads a trace file and makes its label as bytes; `read_label` checks such bytes
and reads them. Which calls are blocks depends on all traces together, so a label holds no order of
blocks yet.

A label as bytes is compressed, and otherwise a file as pilots are (`dynoffload.pilot.artifact`): it
holds no code, and what fails its checksum or does not make sense is refused.
"""

from __future__ import annotations

import gc
import hashlib
import platform
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import DynOffloadError
from dynoffload.pilot.artifact import MAX_FILE, BadArtifactError, pack, unpack
from dynoffload.planning.footprint import Footprint, plan_recorded
from dynoffload.planning.outline import ARRAYS, Outline, outline_of
from dynoffload.profiler.hints import Hint
from dynoffload.profiler.program import resolve
from dynoffload.profiler.sample import Sample
from dynoffload.profiler.storage import load_trace

_FORMAT, _VERSION = "dynoffload.label", 2
_MAKERS = ("dynoffload.planning", "dynoffload.profiler")  # packages of which labels are made


@dataclass(frozen=True, eq=False)
class Label:
    """What a pilot learns from one trace.

    Attributes:
        outline: its calls, their costs, the regions.
        sample: what the sample showed before it ran.
        hints: what the network foretold of its decisions.
        digest: SHA-256 of the trace file.
        plan: what the step asks of memory under the budget; None without one.
    """

    outline: Outline
    sample: Sample
    hints: tuple[Hint, ...]
    digest: str
    plan: Footprint | None

    @property
    def source(self) -> str:
        """Which file or document the sample came from."""
        return self.outline.source


@dataclass(frozen=True)
class Refused:
    """A trace that gave no label.

    Attributes:
        reason: why, with the file's name and the remedy.
    """

    reason: str


class BadLabelError(ValueError):
    """Bytes are not a label, or not the one that was asked for."""


@cache
def makers_version() -> str:
    """Return a digest of the code that makes labels: another one's are not believed."""
    digest = hashlib.sha256()
    folders = [folder for name in _MAKERS for folder in import_module(name).__path__]
    for file in [
        Path(__file__),
        *(f for folder in folders for f in sorted(Path(folder).glob("*.py"))),
    ]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make_label(path: str, key: str, budget: int | None, makers: str) -> bytes | Refused:
    """Read a trace and return its label as bytes; called in worker processes.

    Args:
        path: the trace file, as this process finds it.
        key: what `read_label` shall know the label by.
        budget: bytes to plan under; None for no plan.
        makers: `makers_version` of who asks: other code makes other labels.
    """
    if makers != makers_version():
        return Refused(
            f"{path}: the worker on {platform.node()} runs other code than this process: install "
            "the same release of dynoffload on all workers"
        )
    with _without_collector():
        try:
            recorded_trace = load_trace(Path(path))  # refuses what is larger than any trace
            with Path(path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            made = resolve(recorded_trace)
            plan = None if budget is None else plan_recorded(recorded_trace, budget)
            return _pack(outline_of(made), made.sample, made.hints, digest, plan, key)
        except DynOffloadError as error:
            return Refused(str(error))
        except BadArtifactError as error:
            return Refused(f"{path}: its label cannot be kept: {error}; record shorter steps")
        except OSError as error:
            return Refused(
                f"{path}: cannot be read on {platform.node()} ({error.strerror}); workers must "
                "find the traces under the same path"
            )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the cyclic collector from walking a trace's objects, which make no cycles."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _pack(
    shown: Outline,
    seen: Sample,
    told: Sequence[Hint],
    digest: str,
    plan: Footprint | None,
    key: str,
) -> bytes:
    hinted = list(dict.fromkeys(hint.blocks for hint in told))
    number = {blocks: place for place, blocks in enumerate(hinted)}
    document = {
        "key": key,
        "network": shown.network,
        "source": shown.source,
        "step": shown.step,
        "names": shown.names,
        "values": seen.values,
        "hinted": hinted,
        "digest": digest,
        "plan": None if plan is None else asdict(plan),
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.ascontiguousarray(getattr(shown, name), dtype) for name, dtype in ARRAYS.items()
    }
    arrays["elements"] = np.ascontiguousarray(seen.elements, np.int64)
    arrays["hints"] = np.array([[h.call, number[h.blocks]] for h in told], np.int64).reshape(-1, 2)
    arrays["hint_values"] = np.array([v for h in told for v in h.values], np.float64)
    return zlib.compress(pack(document, arrays, _FORMAT, _VERSION), 1)


def read_label(data: bytes, key: str) -> Label:
    """Return the label in ``data``.

    Raises:
        BadLabelError: if it is none, is damaged, or was made for another ``key``.
    """
    try:
        unfolding = zlib.decompressobj()
        plain = unfolding.decompress(data, MAX_FILE)
        if not unfolding.eof:
            raise BadLabelError("a label that is cut short or too large")
        document, arrays = unpack(plain, _FORMAT, _VERSION)
        if document["key"] != key:
            raise BadLabelError("the label of another trace")
        return _label(document, arrays)
    except BadLabelError:
        raise
    except (zlib.error, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadLabelError(f"not a label ({type(error).__name__}: {error})") from error


def _label(document: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Label:
    """Build a label; ValueError and the like where its parts contradict one another."""
    names = tuple(intern(name) for name in document["names"])
    for name, dtype in ARRAYS.items():
        if arrays[name].dtype != dtype:
            raise BadLabelError(f"{name} is of type {arrays[name].dtype}")
    shown = Outline(
        str(document["network"]),
        intern(str(document["source"])),
        int(document["step"]),
        names,
        **{name: arrays[name] for name in ARRAYS},
    )
    calls, regions = len(shown.call_path), len(shown.region)
    shapes = {
        "call_path": (calls,),
        "call_key": (calls,),
        "call_parent": (calls,),
        "call_activations": (calls,),
        "call_idioms": (calls, 6),
        "region_bytes": (regions,),
        "owned": (len(shown.owned), 2),
    }
    if any(arrays[name].shape != shape for name, shape in shapes.items()):
        raise BadLabelError("arrays of the wrong shape")
    for name in ("call_path", "call_key", "owners", "region", "owned"):
        _within(arrays[name], 0, len(names))
    if not ((shown.call_parent >= -1) & (shown.call_parent < np.arange(calls))).all():
        raise BadLabelError("a call that encloses itself")
    hinted = [tuple(intern(path) for path in blocks) for blocks in document["hinted"]]
    _within(arrays["hints"][:, 0], 0, calls)
    _within(arrays["hints"][:, 1], 0, len(hinted))
    if arrays["hint_values"].size != sum(
        len(hinted[place]) for _, place in arrays["hints"].tolist()
    ):
        raise BadLabelError("hints of another number of values")
    values = iter(arrays["hint_values"].tolist())
    told = tuple(
        Hint(call, hinted[place], tuple(islice(values, len(hinted[place]))))
        for call, place in arrays["hints"].tolist()
    )
    seen = Sample({intern(n): float(v) for n, v in document["values"].items()}, arrays["elements"])
    plan = document["plan"]
    return Label(
        shown, seen, told, str(document["digest"]), None if plan is None else Footprint(**plan)
    )


def _within(numbers: npt.NDArray[Any], least: int, end: int) -> None:
    if numbers.size and not (numbers.min() >= least and numbers.max() < end):
        raise BadLabelError("a number that is out of range")
