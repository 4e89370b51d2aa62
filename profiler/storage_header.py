"""The part of a stored trace that is JSON: sample, regions, module calls, hints.

What it is: `header_of`, and the functions that read its parts back, each of which believes nothing:
every index in range, every name text that can be written, every number one that fits where it goes.
They raise what Python raises at data of another kind, mostly ValueError or TypeError. What it is
not: the file, nor the operators, its columns; see `dynoffload.profiler.storage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynoffload.profiler.hints import MAX_HINTED, Hint
from dynoffload.profiler.sample import MAX_ELEMENTS, Sample
from dynoffload.profiler.trace import ModuleCall, RegionInfo, Trace

LARGEST = 2**62
"""What counts and sizes stay below."""
_KINDS = frozenset(("parameter", "gradient", "state", "activation", "buffer", "input"))
_MAX_VALUES = 100_000
_MAX_MODULE_CALLS = 1_000_000


def most_nesting(calls: int) -> int:
    """Return the most that the depths of so many module calls may add up to."""
    return 1_000_000 + 24 * calls


def header_of(trace: Trace) -> dict[str, Any]:
    """Return the part of a trace that is stored as JSON."""
    regions, calls, elements = trace.regions, trace.calls, trace.sample.elements
    hinted: dict[tuple[str, ...], int] = {}
    for hint in trace.hints:
        hinted.setdefault(hint.blocks, len(hinted))
    return {
        "network": trace.network,
        "model": trace.model,
        "step": trace.step,
        # A file's name need not be text.
        "source": trace.source.encode(errors="backslashreplace").decode(),
        "values": {k: v if math.isfinite(v) else str(v) for k, v in trace.sample.values.items()},
        "elements": elements.reshape(-1).tolist(),
        "width": elements.shape[1] if elements.ndim == 2 else 0,
        "regions": [[getattr(r, f) for r in regions] for f in RegionInfo._fields],
        "calls": [[getattr(c, f) for c in calls] for f in ModuleCall._fields],
        "hinted": [list(blocks) for blocks in hinted],
        "hints": [[h.call, hinted[h.blocks], list(h.values)] for h in trace.hints],
    }


def read_regions(columns: Any, operators: int) -> list[RegionInfo]:
    """Return the regions of a step of so many operators."""
    names, kinds, sizes, born, died = columns
    require(len({*map(len, columns)}) == 1, "regions are not told in columns")
    require(set(kinds) <= _KINDS, "a region is of no known kind")
    require(set(map(type, (*names, *kinds))) <= {str}, "a name is not text")
    require(set(map(type, (*sizes, *born, *died))) <= {int}, "a region is not told in numbers")
    read_text("".join(names))
    require(min(sizes, default=0) >= 0 and sum(sizes) < LARGEST, "regions of an impossible size")
    lives = (*born, *died)
    require(
        min(lives, default=0) >= -1 and max(lives, default=0) <= operators,
        "a region's life lies outside the step",
    )
    return list(map(RegionInfo, names, kinds, sizes, born, died))


def read_calls(columns: Any, operators: int) -> list[ModuleCall]:
    """Return the module calls of a step of so many operators."""
    calls = [ModuleCall(*row) for row in zip(*columns, strict=True)]
    require(len(calls) <= _MAX_MODULE_CALLS, "too many module calls")
    for index, call in enumerate(calls):
        read_text(call.path)
        read_text(call.shape_key)
        require(-1 <= read_integer(call.parent) < index, "a module call encloses itself")
        require(
            0 <= read_integer(call.start) <= read_integer(call.stop) <= operators,
            "a module call lies outside the step",
        )
    require(nesting(calls) <= most_nesting(len(calls)), "module calls nested too deeply")
    return calls


def nesting(calls: Sequence[ModuleCall]) -> int:
    """Return the sum, over the calls, of how many enclose each."""
    depths: list[int] = []
    for call in calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
    return sum(depths)


def read_sample(header: dict[str, Any]) -> Sample:
    """Return what the sample showed."""
    values = header["values"]
    require(isinstance(values, dict) and len(values) <= _MAX_VALUES, "the sample has no values")
    width = read_integer(header["width"])
    elements = np.array([read_integer(code) for code in header["elements"]], dtype=np.int64)
    require(0 <= width <= 1024, "the sample's elements have an impossible width")
    require(len(elements) <= MAX_ELEMENTS * max(width, 1), "the sample has too many elements")
    if width:
        elements = elements.reshape(-1, width)
    return Sample({read_text(name): float(value) for name, value in values.items()}, elements)


def read_hints(header: dict[str, Any], calls: int) -> list[Hint]:
    """Return the hints, each at one of so many module calls."""
    sets = [tuple(map(read_text, blocks)) for blocks in header.get("hinted", [])]
    hints: list[Hint] = []
    for call, number, values in header.get("hints", []):
        require(0 <= read_integer(call) < calls, "a hint belongs to no module call")
        require(0 <= read_integer(number) < len(sets), "a hint is about nothing")
        told = tuple(float(value) for value in values)
        require(len(told) == len(sets[number]) <= MAX_HINTED, "a hint is of the wrong length")
        require(all(0 <= value <= 1 for value in told), "a hint is no chance")
        hints.append(Hint(call, sets[number], told))
    return hints


def read_text(value: object) -> str:
    """Return a text that can be written as UTF-8."""
    require(isinstance(value, str), "a name is not text")
    text = str(value)
    text.encode()  # half of a surrogate pair, which JSON can say, cannot be written anywhere
    return text


def read_integer(value: object) -> int:
    """Return a whole number of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"expected a whole number, found {str(value)[:40]!r}")
    return value


def require(condition: bool, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)
