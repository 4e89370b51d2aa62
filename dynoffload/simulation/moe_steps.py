"""A step of a divided transformer with experts on a cluster: slow wires, uneven experts, parts.

The step of `moe_cluster` on ranks that need not do the same, with collectives of a `cluster` and
its expert layers in parts (`pipeline`). Of remote memory only what strategies S1 to S3 copy counts.

[Note: the step]  Forward, the head, and backward, with all but the experts recomputed just before a
layer's backward. Attention, dense layers and the head are even, and their collectives end on all
ranks at once; so do exchanges of tokens. A step is therefore the sum of its blocks, in each of
which the slowest rank decides. Inside a block only the parts of experts overlap with anything.
Experts keep what backward needs, or restore it by a strategy, and are not recomputed as a whole.
Sums of gradients over groups count as in `movement`, after each layer's backward; updates do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dynoffload.planning.strategies import Strategy
from dynoffload.simulation.cluster import Cluster
from dynoffload.simulation.moe_cluster import MoeShard
from dynoffload.simulation.pipeline import Cost, Elements, Layer, cost_of, elements, part_of
from dynoffload.simulation.roofline import Accelerator, Operator, work
from dynoffload.simulation.routing import Routing, Spread


@dataclass(frozen=True)
class StepCost:
    """A step.

    Attributes:
        experts: of all expert layers, both passes, without what is even in them.
        even_s: compute of all else.
        collective_s: collectives of all else.
    """

    experts: Cost
    even_s: float
    collective_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.even_s + self.collective_s + self.experts.seconds

    @property
    def link_s(self) -> float:
        """What the link works."""
        return self.collective_s + self.experts.link_s

    @property
    def exposed_s(self) -> float:
        """What the step lasts beyond the compute of its slowest ranks."""
        return self.seconds - self.even_s - self.experts.compute_s


@dataclass(frozen=True)
class MoeSteps:
    """Steps of ``shard`` on ``cluster``.

    Attributes:
        shard: what a rank does, were all alike.
        device: every rank.
        cluster: all of them.
    """

    shard: MoeShard
    device: Accelerator
    cluster: Cluster

    @property
    def spread(self) -> Spread:
        """Where experts lie."""
        cut = self.shard.division
        return Spread(self.cluster.ranks, cut.expert, cut.slices)

    @property
    def layer(self) -> Layer:
        """An expert layer."""
        model, cut, element = self.shard.model, self.shard.division, self.shard.precision.element
        inner = model.inner * model.hidden // cut.slices
        row = element * inner / self.device.local_bytes_per_s
        return Layer(model.hidden, inner, element, 2 * row, 3 * row)

    def step(
        self, routings: Sequence[Routing], parts: int = 1, strategy: Strategy = Strategy.NONE
    ) -> StepCost:
        """Return what a step costs.

        Args:
            routings: one for each expert layer, of all its rows, or one for all of them.
            parts: of the batch, in expert layers.
            strategy: how what parts overwrite is restored.
        """
        layer = self.layer
        each = [
            cost_of(
                part_of(layer, routing.part(parts), self.spread, self.device, self.cluster),
                parts,
                strategy,
            )
            for routing in routings
        ]
        experts = sum(each, _NOTHING)
        if len(each) == 1:
            experts = sum(each * self.shard.model.moe_layers, _NOTHING)
        return StepCost(experts, self._even, self._collectives)

    def kept(self, routings: Sequence[Routing], parts: int, strategy: Strategy) -> Elements:
        """Return what the rank with most rows holds of all expert layers, in elements.

        Activations are those of all layers, and buffers of one; states are left out.
        """
        layer, count = self.layer, self.shard.model.moe_layers
        most = max(float(routing.received(self.spread).max()) for routing in routings)
        shared = strategy.reuses
        one = elements(most, layer.width, layer.inner, 0, parts, shared=shared)
        return Elements(0.0, count * one.activations, one.buffers)

    @cached_property
    def _even(self) -> float:
        """Return the seconds of what all ranks do alike."""
        shard = self.shard
        blocks = shard.attention, shard.feed_forward, shard.around_experts
        counts = self._counts()
        operators: list[Operator] = []
        for block, times in zip(blocks, counts, strict=True):
            operators += (*block.forward, *block.forward, *block.backward) * times
        operators += (*shard.head.forward, *shard.head.backward)
        done = work(operators, self.device)
        return done.compute_s + done.local_s

    def _counts(self) -> tuple[int, int, int]:
        """Return how many layers have attention, a dense feed-forward, and experts."""
        model = self.shard.model
        return model.layers, model.layers - model.moe_layers, model.moe_layers

    @cached_property
    def _collectives(self) -> float:
        """Return the seconds of gathers and sums outside of expert layers."""
        shard, cut, element = self.shard, self.shard.division, self.shard.precision.element
        layers, dense, _ = self._counts()
        tensor = self.cluster.rings(cut.tensor)
        ring = self.cluster.all_gather(shard.gathered, tensor)
        # Each block gathers and scatters in forward and once more when it is recomputed, and
        # thrice in backward; the head gathers once, and twice in backward.
        found = (2 + 2 + 3) * ring * (layers + dense)
        if shard.model.vocabulary:
            found += 3 * ring
        groups = self.cluster.rings(cut.data, cut.tensor)
        copies = self.cluster.rings(cut.replicas, cut.expert * cut.slices)
        for one in (*shard.layers, shard.head):
            found += self.cluster.all_gather(element * one.dense, groups)
            found += self.cluster.all_gather(element * one.expert, copies)
        return found


_NOTHING = Cost(0.0, 0.0, 0.0, 0.0, 0.0)
