"""Trace of one training step: the operators executed and the storages each touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingHint


class Phase(str, Enum):
    """The part of a training step in which an operator ran.

    Forward includes the loss. Optimizer is all that runs outside the network after backward:
    gradient clipping and the optimizer's own step.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class RegionInfo(NamedTuple):
    """One storage, tracked as one unit.

    Attributes:
        name: the parameter's or buffer's own name (the first of tied ones); for a gradient
            ``"<parameter>:grad"``; for optimizer state ``"<parameter>:<key>"``; for an activation
            ``"<site>:<number>"``; for an input ``"input:<number>"``.
        kind: ``"parameter"``, ``"gradient"``, ``"state"``, ``"activation"``, ``"buffer"`` or
            ``"input"``.
        nbytes: size of the storage in bytes.
        born: index of the operator that allocated it, -1 if allocated before the step.
        died: index of the last operator recorded before it was freed, -1 if alive at the end.
    """

    name: str
    kind: str
    nbytes: int
    born: int = -1
    died: int = -1


def owner_of(region: RegionInfo) -> str | None:
    """Return the path of the module that owns a parameter, its gradient or its state.

    None for any other region.
    """
    if region.kind not in ("parameter", "gradient", "state"):
        return None
    return region.name.partition(":")[0].rpartition(".")[0]


class Operator(NamedTuple):
    """One executed ATen call.

    Views and metadata queries touch no data: their bytes and FLOPs are 0, reads and writes empty.

    Attributes:
        name: the overload's full name, such as ``"aten.mm.default"``.
        phase: the part of the step it ran in.
        site: path of the module it belongs to, ``""`` for the root or outside any module. In
            backward, the module whose forward call created the graph node.
        call: index into `Trace.calls` of the innermost module call it belongs to, -1 if none.
        idioms: its six memory-access counts.
        bytes_read: bytes of its tensor arguments; a view counts its elements, not its storage.
        bytes_written: bytes of the tensors it created or changed in place.
        seconds: its duration in seconds, without the recorder's own time.
        reads: indices into `Trace.regions` of the storages it read.
        writes: indices into `Trace.regions` of the storages it created or wrote.
        memory: bytes of all recorded storages alive after it.
        flops: floating-point operations of products, convolutions and attention, 0 for any other
            operator (see `dynoffload.profiler.flops`); None if unknown, as in traces of older
            releases.
        dtype: the type it computes in, such as ``"float32"``: that of the first floating-point
            tensor, else of the first; ``""`` if it touches none, and in traces of older releases.
    """

    name: str
    phase: Phase
    site: str
    call: int
    idioms: Idioms
    bytes_read: int
    bytes_written: int
    seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    memory: int
    flops: int | None = None
    dtype: str = ""


class ModuleCall(NamedTuple):
    """One call of one module in forward, or one expert that a call of a fused layer ran.

    Attributes:
        path: the unit's path (`dynoffload.profiler.experts`), ``""`` for the root. Operators belong
            to calls of modules; an expert's call is within its layer's, and has none of its own.
        shape_key: canonical bucket of its input shapes.
        parent: index of the enclosing call, or -1.
        start: index of the first operator that ran inside it.
        stop: one past the last operator that ran inside it.
    """

    path: str
    shape_key: str
    parent: int
    start: int
    stop: int


@dataclass
class Trace:
    """The operators of one step and the regions each used.

    Attributes:
        network: the model's fingerprint.
        model: the model's class name.
        step: number of the step, from 0.
        source: the file or document the sample came from, so that splits can hold out whole
            sources; may be ``""``.
        sample: input features known before forward.
        regions: every storage the step touched.
        calls: module calls of forward, in the order they began.
        operators: the operators that ran, in order.
        hints: routing hints given by the model, in call order.
        slices: names of the parameters of fused layers that ran, each with its number of experts.
    """

    network: str
    model: str
    step: int
    source: str
    sample: InputFeatures
    regions: list[RegionInfo] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    operators: Sequence[Operator] = field(default_factory=list)
    hints: list[RoutingHint] = field(default_factory=list)
    slices: dict[str, int] = field(default_factory=dict)
