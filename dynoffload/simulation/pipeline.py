"""An expert-parallel layer in parts: exchanges of one part beside the products of another.

The schedule of MPipeMoE (Zhang et al., IPDPS 2023): the batch in n parts, each dispatched (S),
computed (C) and combined (R), and four ways to restore in backward what the parts overwrite in
buffers that they share; and its formula of memory. A pipeline takes time to fill and to drain,
which `Cost.bound`, the published max(compute, communication, copies), leaves out.

[Note: the tasks of a part]  Products are counted in units of rows x width x inner multiply-adds.
Forward: S, first product, second product, R; a strategy that offloads copies the dispatched input
once it is there, and the middle once the first product has made it. Backward: the exchange of the
output's gradient; the input comes back by a copy or by one more S, the middle by a copy or by one
more first product; then two products make the gradients of the second matrix and of the middle, two
those of the first matrix and of the input, and R takes that to its ranks. Per part these are the
published volumes [products, exchanges, copies], with an inner width of four times the width.

[Note: shared buffers]  Under S1 to S4 parts take turns on two buffers for inputs, two for outputs
and one for the middle. What writes one waits for what used it last: two parts before, or one.
Every part's input and middle are restored, also those that are still in their buffers, as the
published volumes have it. Without a strategy every part has buffers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.cluster import Cluster
from dynoffload.simulation.roofline import Accelerator
from dynoffload.simulation.routing import Routing, Spread
from dynoffload.simulation.streams import Floats, Resource, Timeline

COMPUTE, LINK, COPY = Resource.COMPUTE, Resource.LINK, Resource.COPY


@dataclass(frozen=True)
class Layer:
    """Dimensions of an expert-parallel layer, as one rank holds it.

    Attributes:
        width: of a row.
        inner: of an expert, or of the slice of one.
        element: bytes of one.
        activation, activation_backward: seconds of a row between the products, if they count.
    """

    width: int
    inner: int
    element: int = 2
    activation: float = 0.0
    activation_backward: float = 0.0


@dataclass(frozen=True)
class Part:
    """Seconds of one part's units, alone.

    Attributes:
        product: one matrix product, on each rank.
        dispatch, combine: one all-to-all, to the experts and back.
        copy_input, copy_middle: one copy, on each rank.
        activation, activation_backward: between the products, on each rank.
    """

    product: Floats
    dispatch: float
    combine: float
    copy_input: Floats
    copy_middle: Floats
    activation: Floats
    activation_backward: Floats


def part_of(
    layer: Layer, routing: Routing, spread: Spread, device: Accelerator, cluster: Cluster
) -> Part:
    """Return what a part takes.

    A product takes its arithmetic, or its traffic if that takes longer: all matrices that the rank
    holds, whatever part of the batch it is for, and the rows. Copies go to the remote memory.

    Args:
        layer: its dimensions.
        routing: of the part.
        spread: where experts lie.
        device: every rank.
        cluster: of the ranks; its exchanges follow from who sends what to whom.
    """
    received = routing.received(spread)
    sent = routing.sent(spread, layer.width * layer.element)
    macs = received * (layer.width * layer.inner)
    held = routing.rows.shape[1] / spread.groups * layer.width * layer.inner
    traffic = layer.element * (held + received * (layer.width + layer.inner))
    product = np.maximum(2 * macs / device.flops_per_s, traffic / device.local_bytes_per_s)
    copied = received * layer.element / device.remote.share
    return Part(
        product=np.where(received > 0, product, 0.0),
        dispatch=cluster.all_to_all(sent),
        combine=cluster.all_to_all(sent.T),
        copy_input=layer.width * copied,
        copy_middle=layer.inner * copied,
        activation=received * layer.activation,
        activation_backward=received * layer.activation_backward,
    )


def forward(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Timeline:
    """Return forward's tasks for ``parts`` parts; see [Note: the tasks of a part]."""
    tasks, shares = Timeline(len(part.product)), strategy.reuses
    dispatched: list[int] = []
    offloaded: list[list[int]] = [[] for _ in range(parts)]  # inputs
    first: list[int] = []
    second: list[int] = []
    combined: list[int] = []
    emptied: list[int] = []  # what frees the middle's buffer

    def dispatch(k: int) -> None:
        free = [first[k - 2], *offloaded[k - 2]] if shares and k >= 2 else []
        dispatched.append(tasks.add(f"S{k}", LINK, part.dispatch, free))

    def offload_input(k: int) -> None:
        if strategy.offloads_rows:
            offloaded[k] = [tasks.add(f"input {k} out", COPY, part.copy_input, [dispatched[k]])]

    dispatch(0)
    offload_input(0)
    for k in range(parts):
        if k + 1 < parts:
            dispatch(k + 1)
        seconds = part.product + part.activation
        waits = [dispatched[k], *(emptied[-1:] if shares else [])]
        first.append(tasks.add(f"first {k}", COMPUTE, seconds, waits))
        if strategy.offloads_middle:
            emptied.append(tasks.add(f"middle {k} out", COPY, part.copy_middle, [first[k]]))
        waits = [first[k], *(combined[k - 2 : k - 1] if shares and k >= 2 else [])]
        second.append(tasks.add(f"second {k}", COMPUTE, part.product, waits))
        combined.append(tasks.add(f"R{k}", LINK, part.combine, [second[k]]))
        if k + 1 < parts:
            offload_input(k + 1)
    return tasks


def backward(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Timeline:
    """Return backward's tasks for ``parts`` parts; see [Note: the tasks of a part]."""
    tasks, shares = Timeline(len(part.product)), strategy.reuses
    inputs: list[list[int]] = []
    middles: list[list[int]] = []
    gradients: list[int] = []
    outer: list[int] = []
    inner: list[int] = []
    returned: list[int] = []

    def arrive(k: int) -> None:
        if shares:
            free = inner[k - 2 : k - 1] if k >= 2 else []
            if strategy.offloads_rows:
                inputs.append([tasks.add(f"input {k} in", COPY, part.copy_input, free)])
            else:
                inputs.append([tasks.add(f"S{k} again", LINK, part.dispatch, free)])
        else:
            inputs.append([])
        free = outer[k - 2 : k - 1] if shares and k >= 2 else []
        gradients.append(tasks.add(f"dR{k}", LINK, part.dispatch, free))

    def copy_middle(k: int) -> None:
        if strategy.offloads_middle:
            free = outer[k - 1 : k] if k else []
            middles.append([tasks.add(f"middle {k} in", COPY, part.copy_middle, free)])

    arrive(0)
    copy_middle(0)
    for k in range(parts):
        if k + 1 < parts:
            arrive(k + 1)
        if strategy.computes_again:
            again = part.product + part.activation
            middles.append([tasks.add(f"first {k} again", COMPUTE, again, inputs[k])])
        elif not shares:
            middles.append([])
        seconds = 2 * part.product + part.activation_backward
        waits = [gradients[k], *middles[k]]
        outer.append(tasks.add(f"second {k} backward", COMPUTE, seconds, waits))
        if k + 1 < parts:
            copy_middle(k + 1)
        waits = [outer[k], *inputs[k], *(returned[k - 2 : k - 1] if shares and k >= 2 else [])]
        inner.append(tasks.add(f"first {k} backward", COMPUTE, 2 * part.product, waits))
        returned.append(tasks.add(f"dS{k}", LINK, part.combine, [inner[k]]))
    return tasks


@dataclass(frozen=True)
class Cost:
    """One pass of a layer, or several in a row.

    Attributes:
        seconds: of it.
        compute_s: of the rank that computes longest.
        even_s: of compute, the mean over ranks.
        link_s: that exchanges run.
        copy_s: of the rank that copies longest.
    """

    seconds: float
    compute_s: float
    even_s: float
    link_s: float
    copy_s: float

    @staticmethod
    def of(timeline: Timeline) -> Cost:
        """Return what ``timeline`` shows."""
        compute = timeline.busy(COMPUTE)
        return Cost(
            timeline.seconds,
            float(compute.max()),
            float(compute.mean()),
            float(timeline.busy(LINK).max()),
            float(timeline.busy(COPY).max()),
        )

    @property
    def bound(self) -> float:
        """The published cost: the longest of compute, exchanges and copies."""
        return max(self.compute_s, self.link_s, self.copy_s)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.compute_s + other.compute_s,
            self.even_s + other.even_s,
            self.link_s + other.link_s,
            self.copy_s + other.copy_s,
        )


def cost_of(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Cost:
    """Return what both passes of ``parts`` such parts cost."""
    return Cost.of(forward(part, parts, strategy)) + Cost.of(backward(part, parts, strategy))


@dataclass(frozen=True)
class Elements:
    """What a rank holds of a layer, in elements; the published formula.

    Attributes:
        states: parameters of the gate and of one expert, gradients and two moments.
        activations: from forward to backward.
        buffers: of backward.
    """

    states: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.activations + self.buffers


def elements(
    rows: float, width: int, inner: int, experts: int, parts: int = 1, *, shared: bool = True
) -> Elements:
    """Return what a rank holds of a layer with one expert on each rank.

    Args:
        rows: of the batch.
        width: of a row.
        inner: of an expert.
        experts: that the gate chooses from.
        parts: of the batch.
        shared: parts share buffers; see [Note: shared buffers].

    What sharing saves is printed once for activations and buffers both, and passes the buffers
    themselves beyond 8 parts with an inner width of four times the width: they are 0 there.
    """
    saved = 0.0
    if shared and parts > 1:
        saved = rows * (2 * width * (parts - 2) / parts + inner * (parts - 1) / parts)
    return Elements(
        4.0 * (experts * width + 2 * inner * width),
        rows * (4 * width + inner) - saved,
        max(0.0, rows * (width + inner) - saved),
    )
