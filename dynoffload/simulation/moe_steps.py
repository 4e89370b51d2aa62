"""Training steps of a mixture-of-experts transformer on a cluster, with expert layers in parts.

This is the step of `moe_cluster` on `ranks` with unequal loads. Expert layers run in parts: the
schedule of MPipeMoE (Zhang et al., IPDPS 2023), with four strategies to restore in backward the
shared buffers that parts overwrite. Remote memory only counts for the copies of S1 to S3.

[Note: the step]  Forward, the head, and backward, with all but the experts recomputed just before a
layer's backward. Attention, dense layers and the head take equal time on all ranks; their
collectives and the exchanges of tokens end on all ranks at once. So a step is the sum of its
blocks, each as slow as its slowest rank. Within a block only the parts of experts overlap. Experts
keep what backward needs, or restore it by a strategy, and are not recomputed as a whole. Sums of
gradients over groups count as in `movement`, after each layer's backward; updates do not count.

[Note: the tasks of a part]  Products are counted in units of rows x width x inner multiply-adds.
Forward: S (dispatch), first product, second product, R (combine). A strategy that offloads copies
the dispatched input after S, and the middle after the first product.
Backward: the exchange of the output's gradient. The input is restored by a copy or by repeating S,
the middle by a copy or by repeating the first product. Two products compute the gradients of the
second matrix and of the middle, two those of the first matrix and of the input. R returns the
latter to its ranks. Per part these are the published volumes [products, exchanges, copies], with an
inner width of four times the width.

[Note: shared buffers]  Under S1 to S4 parts alternate between two buffers for inputs, two for
outputs and one for the middle. A task that writes a buffer waits for its previous user, two parts
before or one. Every part's input and middle are restored, even if they are still in their buffers,
as in the published volumes. Without a strategy every part has its own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.simulation.moe_cluster import MoeShard
from dynoffload.simulation.ranks import Cluster, Floats, Resource, Routing, Timeline
from dynoffload.simulation.roofline import ELEMENT, Accelerator, Operator, work

COMPUTE, LINK, COPY = Resource.COMPUTE, Resource.LINK, Resource.COPY


@dataclass(frozen=True)
class Layer:
    """Dimensions of an expert-parallel layer, as one rank holds it.

    Attributes:
        width: width of a row.
        inner: inner width of an expert, or of its slice.
        activation, activation_backward: seconds per row between the products; 0 to ignore them.
    """

    width: int
    inner: int
    activation: float = 0.0
    activation_backward: float = 0.0

    def kept(self, rows: float, parts: int = 1, *, shared: bool = True) -> tuple[float, float]:
        """Return the number of elements of activations kept for backward, and of backward's
        buffers, by the published formula.

        The paper gives one formula for the savings of both. With an inner width of four times the
        width they exceed the buffers beyond 8 parts; the buffers are 0 there.

        Args:
            rows: rows of the batch.
            parts: parts of the batch.
            shared: whether parts share buffers; see [Note: shared buffers]."""
        saved = 0.0
        if shared and parts > 1:
            saved = 2 * self.width * (parts - 2) / parts + self.inner * (parts - 1) / parts
        activations, buffers = 4 * self.width + self.inner, self.width + self.inner
        return rows * (activations - saved), rows * max(0.0, buffers - saved)


@dataclass(frozen=True)
class Part:
    """Seconds of one part's tasks, each without overlap.

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


def part_of(layer: Layer, routing: Routing, device: Accelerator, cluster: Cluster) -> Part:
    """Return the seconds of a part's tasks.

    A product takes the longer of its arithmetic and its traffic: all matrices that the rank holds,
    whatever the part's size, and the rows. Copies go to the remote memory.

    Args:
        layer: its dimensions.
        routing: routing of the part's rows.
        device: the device of every rank.
        cluster: the cluster, which determines the time of the exchanges.
    """
    sent = routing.sent()
    received: Floats = sent.sum(axis=0)
    macs = received * (layer.width * layer.inner)
    held = routing.rows.shape[1] / routing.groups * layer.width * layer.inner
    traffic = ELEMENT * (held + received * (layer.width + layer.inner))
    product = np.maximum(2 * macs / device.flops_per_s, traffic / device.local_bytes_per_s)
    copied = received * ELEMENT / device.remote.share
    row = layer.width * ELEMENT
    return Part(
        product=np.where(received > 0, product, 0.0),
        dispatch=cluster.all_to_all(sent * row),
        combine=cluster.all_to_all(sent.T * row),
        copy_input=layer.width * copied,
        copy_middle=layer.inner * copied,
        activation=received * layer.activation,
        activation_backward=received * layer.activation_backward,
    )


def forward(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Timeline:
    """Return forward's tasks for ``parts`` parts; see [Note: the tasks of a part]."""
    tasks, shares = Timeline(len(part.product)), strategy.reuses
    sent, copied, first, emptied, combined = (list[Floats]() for _ in range(5))

    def dispatch(k: int) -> None:
        free = [*first[k - 2 : k - 1], *copied[k - 2 : k - 1]] if shares and k >= 2 else []
        sent.append(tasks.add(LINK, part.dispatch, free))

    dispatch(0)
    for k in range(parts):
        if strategy.offloads_rows:
            copied.append(tasks.add(COPY, part.copy_input, [sent[k]]))
        if k + 1 < parts:
            dispatch(k + 1)
        product = part.product + part.activation
        first.append(tasks.add(COMPUTE, product, [sent[k], *emptied[-1:]]))
        if strategy.offloads_middle:
            emptied.append(tasks.add(COPY, part.copy_middle, [first[k]]))
        free = combined[k - 2 : k - 1] if shares and k >= 2 else []
        second = tasks.add(COMPUTE, part.product, [first[k], *free])
        combined.append(tasks.add(LINK, part.combine, [second]))
    return tasks


def backward(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Timeline:
    """Return backward's tasks for ``parts`` parts; see [Note: the tasks of a part]."""
    tasks, shares = Timeline(len(part.product)), strategy.reuses
    inputs, gradients, outer, inner, returned = (list[Floats]() for _ in range(5))

    def before(ends: list[Floats], k: int, count: int = 2) -> list[Floats]:
        return ends[k - count : k - count + 1] if shares and k >= count else []

    def arrive(k: int) -> None:
        if strategy.offloads_rows:
            inputs.append(tasks.add(COPY, part.copy_input, before(inner, k)))
        elif shares:
            inputs.append(tasks.add(LINK, part.dispatch, before(inner, k)))
        gradients.append(tasks.add(LINK, part.dispatch, before(outer, k)))

    arrive(0)
    for k in range(parts):
        middle: list[Floats] = []
        if strategy.offloads_middle:
            middle = [tasks.add(COPY, part.copy_middle, before(outer, k, 1))]
        if k + 1 < parts:
            arrive(k + 1)
        if strategy.computes_again:
            middle = [tasks.add(COMPUTE, part.product + part.activation, inputs[k : k + 1])]
        product = 2 * part.product + part.activation_backward
        outer.append(tasks.add(COMPUTE, product, [gradients[k], *middle]))
        waits = [outer[k], *inputs[k : k + 1], *before(returned, k)]
        inner.append(tasks.add(COMPUTE, 2 * part.product, waits))
        returned.append(tasks.add(LINK, part.combine, [inner[k]]))
    return tasks


@dataclass(frozen=True)
class Cost:
    """Cost of one pass of a layer, or of several in a row.

    Attributes:
        seconds: total seconds.
        compute_s: seconds of compute on the rank that computes longest.
        even_s: mean seconds of compute over ranks.
        link_s: seconds of exchanges.
        copy_s: seconds of copies on the rank that copies longest.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    even_s: float = 0.0
    link_s: float = 0.0
    copy_s: float = 0.0

    @staticmethod
    def of(timeline: Timeline) -> Cost:
        """Return the cost of a timeline."""
        compute, link, copy = (timeline.busy[resource] for resource in (COMPUTE, LINK, COPY))
        most = float(compute.max()), float(compute.mean()), float(link.max()), float(copy.max())
        return Cost(timeline.seconds, *most)

    @property
    def bound(self) -> float:
        """The published cost, without the time to fill and drain the pipeline."""
        return max(self.compute_s, self.link_s, self.copy_s)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def cost_of(part: Part, parts: int, strategy: Strategy = Strategy.NONE) -> Cost:
    """Return the cost of forward and backward of ``parts`` equal parts."""
    return Cost.of(forward(part, parts, strategy)) + Cost.of(backward(part, parts, strategy))


@dataclass(frozen=True)
class StepCost:
    """Cost of a step.

    Attributes:
        experts: cost of all expert layers, both passes, without their parts in ``even_s``.
        even_s: seconds of compute that is equal on all ranks.
        collective_s: seconds of collectives outside of expert layers.
    """

    experts: Cost
    even_s: float
    collective_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.even_s + self.collective_s + self.experts.seconds

    @property
    def link_s(self) -> float:
        """Seconds that the link is busy."""
        return self.collective_s + self.experts.link_s

    @property
    def exposed_s(self) -> float:
        """Seconds of the step beyond the compute of its slowest ranks."""
        return self.seconds - self.even_s - self.experts.compute_s


@dataclass(frozen=True)
class MoeSteps:
    """Simulates steps of ``shard`` on ``cluster``; see [Note: the step].

    Attributes:
        shard: the work of a rank if loads were equal.
        device: the device of every rank.
        cluster: the cluster of the ranks.
    """

    shard: MoeShard
    device: Accelerator
    cluster: Cluster

    @property
    def layer(self) -> Layer:
        """The dimensions of an expert layer."""
        model, cut = self.shard.model, self.shard.division
        inner = model.inner * model.hidden // cut.slices
        row = ELEMENT * inner / self.device.local_bytes_per_s
        return Layer(model.hidden, inner, 2 * row, 3 * row)

    def step(
        self, routings: Sequence[Routing], parts: int = 1, strategy: Strategy = Strategy.NONE
    ) -> StepCost:
        """Return the cost of a step.

        Args:
            routings: one for each expert layer, of all its rows, or one for all of them.
            parts: parts of the batch in expert layers.
            strategy: how overwritten buffers are restored.
        """
        each = [
            cost_of(
                part_of(self.layer, routing.part(parts), self.device, self.cluster), parts, strategy
            )
            for routing in routings
        ]
        if len(each) == 1:
            each *= self.shard.model.moe_layers
        return StepCost(sum(each, Cost()), self._even, self._collectives)

    def kept_bytes(self, routings: Sequence[Routing], parts: int, strategy: Strategy) -> float:
        """Return the bytes on the rank with most rows: activations of all expert layers, and
        buffers of one."""
        most = max(float(routing.sent().sum(axis=0).max()) for routing in routings)
        activations, buffers = self.layer.kept(most, parts, shared=strategy.reuses)
        return ELEMENT * (self.shard.model.moe_layers * activations + buffers)

    @cached_property
    def _even(self) -> float:
        """Return the seconds of compute that is equal on all ranks."""
        shard, model = self.shard, self.shard.model
        operators: list[Operator] = [*shard.head.forward, *shard.head.backward]
        for block, times in (
            (shard.attention, model.layers),
            (shard.feed_forward, model.layers - model.moe_layers),
            (shard.around_experts, model.moe_layers),
        ):
            operators += (*block.forward, *block.forward, *block.backward) * times
        done = work(operators, self.device)
        return done.compute_s + done.local_s

    @cached_property
    def _collectives(self) -> float:
        """Return the seconds of gathers and sums outside of expert layers."""
        shard, cut = self.shard, self.shard.division
        blocks = 2 * shard.model.layers - shard.model.moe_layers
        ring = self.cluster.all_gather(shard.gathered, self.cluster.rings(cut.tensor))
        # Each block gathers and scatters in forward and when it is recomputed, and has three
        # collectives in backward. The head gathers once in forward and twice in backward.
        found = ((2 + 2 + 3) * blocks + 3 * bool(shard.model.vocabulary)) * ring
        groups = self.cluster.rings(cut.data, cut.tensor)
        copies = self.cluster.rings(cut.replicas, cut.expert * cut.slices)
        for one in (*shard.layers, shard.head):
            found += self.cluster.all_gather(ELEMENT * one.dense, groups)
            found += self.cluster.all_gather(ELEMENT * one.expert, copies)
        return found
