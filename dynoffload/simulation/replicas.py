"""Recorded steps on several ranks: gradients are summed in buckets while backward goes on.

What it is: data-parallel training of a recorded workload, where ranks have steps of their own, such
as other samples that take other paths, and each sum of gradients begins when the slowest rank has
its bucket. What it is not: sharded parameters, or what a step costs one rank alone: that is the
recorded step's own, or what `Training` made of it under a budget.

[Note: buckets]  As DistributedDataParallel has them: parameters in the reverse of the model's
order, in buckets that are closed once they hold so many bytes, the first a small one; sums start in
that order, never before the bucket's last gradient. A parameter that a rank's sample does not use
has its gradient, zeros, when that rank's backward begins, and is summed all the same
(``find_unused_parameters``).

[Note: what is left out]  The step is taken to be whole: no update begins before its rank has all
sums and has ended backward. Under a budget this says nothing of updates that wait for their
parameters' next use: `Training` counts those to the forward in which they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynoffload.errors import ConfigError
from dynoffload.simulation.cluster import Cluster
from dynoffload.simulation.recorded import Network, Recorded
from dynoffload.simulation.streams import Floats, Program, Resource, Slowdown
from dynoffload.simulation.training import Training
from dynoffload.units import MiB


@dataclass(frozen=True)
class RankStep:
    """One rank's step, had it no other ranks.

    Attributes:
        forward_s, backward_s, update_s: its phases.
        complete: parameter -> seconds from the begin of backward until its gradient is complete.
    """

    forward_s: float
    backward_s: float
    update_s: float
    complete: tuple[tuple[int, float], ...]

    @staticmethod
    def plain(step: Recorded) -> RankStep:
        """Return ``step`` as it was recorded, all in memory."""
        forward, backward, update = step.seconds
        clock, complete = 0.0, []
        for piece in step.backward:
            clock += piece.seconds
            complete += [(number, clock) for number in piece.completes]
        return RankStep(forward, backward, update, tuple(complete))

    @staticmethod
    def budgeted(
        training: Training, step: Recorded, predicted: Sequence[str] | None = None
    ) -> RankStep:
        """Make ``step`` under a budget, and return it; the arguments are those of `Training`."""
        training.step(step, predicted)
        forward, backward, update = (phase.seconds for phase in training.phases)
        return RankStep(forward, backward, update, tuple(training.completions))

    @property
    def alone_s(self) -> float:
        """The whole step, had the rank no others."""
        return self.forward_s + self.backward_s + self.update_s


def buckets(network: Network, most: int = 25 * MiB, first: int = MiB) -> list[list[int]]:
    """Return the numbers of the parameters that are summed together; see [Note: buckets].

    Args:
        network: whose parameters they are.
        most: bytes at which a bucket is closed.
        first: bytes at which the first one is.
    """
    found: list[list[int]] = []
    size, limit = 0, min(first, most)
    for number in reversed(range(len(network.parameters))):
        one = network.parameters[number]
        if not one.trained:
            continue
        if not found or size >= limit:
            limit = min(first, most) if not found else most
            found.append([])
            size = 0
        found[-1].append(number)
        size += one.nbytes
    return found


@dataclass(frozen=True)
class Replicated:
    """What steps on several ranks cost.

    Attributes:
        seconds: of each step, from when the first rank begins it to when the last has ended it.
        alone_s: of each step and rank, had it no others.
        link_s: of each step, that sums are under way.
        total_s: of all steps together.
    """

    seconds: tuple[float, ...]
    alone_s: tuple[tuple[float, ...], ...]
    link_s: tuple[float, ...]
    total_s: float

    @property
    def slowest_s(self) -> float:
        """All steps, each as long as its slowest rank alone; ranks that are slow in turn, one in
        forward and one in backward, take longer even if sums cost nothing."""
        return sum(max(ranks) for ranks in self.alone_s)


def replicated(
    steps: Sequence[Sequence[RankStep]],
    network: Network,
    cluster: Cluster,
    *,
    most: int = 25 * MiB,
    slowdown: Slowdown | None = None,
) -> Replicated:
    """Return what ``steps`` cost on the ranks of ``cluster``.

    Args:
        steps: for each step, those of all ranks.
        network: that trains.
        cluster: sums gradients.
        most: bytes of a bucket.
        slowdown: of compute beside sums, and of sums beside compute.

    Raises:
        ConfigError: a step has more or fewer ranks than the cluster.
    """
    groups = buckets(network, most)
    sums = [
        cluster.all_reduce(sum(network.parameters[number].nbytes for number in group))
        for group in groups
    ]
    program = Program(cluster.ranks)
    bounds: list[tuple[int, int, list[int]]] = []
    before: list[int] = []
    for number, ranks in enumerate(steps):
        if len(ranks) != cluster.ranks:
            raise ConfigError(
                f"step {number} has {len(ranks)} ranks and the cluster {cluster.ranks}: give a "
                "step for each"
            )
        ready = np.array([_ready(one, groups) for one in ranks])
        begin = program.add("forward", Resource.COMPUTE, [r.forward_s for r in ranks], before)
        collectives = []
        clock: Floats = np.zeros(cluster.ranks)
        last = begin
        for place, seconds in enumerate(sums):
            last = program.add("backward", Resource.COMPUTE, ready[:, place] - clock, [last])
            clock = ready[:, place]
            collectives.append(program.add(f"sum {place}", Resource.LINK, seconds, [last]))
        rest = np.maximum(0.0, np.array([r.backward_s for r in ranks]) - clock)
        last = program.add("backward", Resource.COMPUTE, rest, [last])
        waits = [last, *collectives]
        end = program.add("update", Resource.COMPUTE, [r.update_s for r in ranks], waits)
        bounds.append((begin, end, collectives))
        before = [end]
    timeline = program.run(slowdown)
    return Replicated(
        tuple(float(timeline.ends[e].max() - timeline.starts[b].min()) for b, e, _ in bounds),
        tuple(tuple(one.alone_s for one in ranks) for ranks in steps),
        tuple(
            float(sum((timeline.ends[c] - timeline.starts[c]).max() for c in collectives))
            for _, _, collectives in bounds
        ),
        timeline.seconds,
    )


def _ready(step: RankStep, groups: Sequence[Sequence[int]]) -> list[float]:
    """Return when each bucket may be summed, in the order of the buckets."""
    when = dict(step.complete)
    found: list[float] = []
    clock = 0.0
    for group in groups:
        clock = max([clock, *(when.get(number, 0.0) for number in group)])
        found.append(min(clock, step.backward_s))
    return found
