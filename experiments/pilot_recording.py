"""Recorded training steps of a case, as a pilot learns from them, and the same samples run again.

`record` trains a network of the zoo, traces its steps and keeps of them what a pilot sees. Now and
then the training holds still. Held-out samples of the steps around are then run through the network
as it is at that moment. How far such an order agrees with the one of the sample's own step tells
what is left to anybody who knows sample and network, but as of another moment.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dynoffload.experiments.pilot_cases import Case
from dynoffload.pilot.features import Example
from dynoffload.pilot.labels import Label, encode_example, label_traces
from dynoffload.pilot.progress import Report
from dynoffload.pilot.sources import split_by_source
from dynoffload.pilot.train import HOLDOUT
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary

if TYPE_CHECKING:
    import torch

    from dynoffload.experiments.zoo.building import ZooSample

MOMENTS = 6
"""Times that a training holds still for held-out samples to be run again."""


@dataclass(frozen=True)
class Again:
    """A held-out sample, run through the network of another moment.

    Attributes:
        step: its own.
        apart: steps of training between its own and that moment.
        blocks: the order that it ran then.
    """

    step: int
    apart: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """What is kept of a case's training.

    Attributes:
        vocabulary: the network's blocks, cut from the steps that are learned from.
        examples: every step, in order.
        held_out: the numbers of the steps that scores are taken on, ascending.
        again: the held-out samples at other moments.
    """

    vocabulary: Vocabulary
    examples: Sequence[Example]
    held_out: Sequence[int]
    again: Sequence[Again] = ()

    @property
    def learned(self) -> list[Example]:
        """The steps that are learned from."""
        aside = set(self.held_out)
        return [example for step, example in enumerate(self.examples) if step not in aside]

    @property
    def scored(self) -> list[Example]:
        """The steps that scores are taken on."""
        return [self.examples[step] for step in self.held_out]


def record(case: Case, samples: int, seed: int) -> Recording:
    """Train a case's network and return what a pilot sees of it.

    Args:
        case: what to train.
        samples: steps that are recorded.
        seed: of the weights, of the samples' order, and of what is held out.
    """
    import torch

    from dynoffload.experiments import zoo

    model = zoo.build(case.network, case.preset, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True)
    stream = zoo.samples(case.network, "train", seed=seed, **case.shape)
    torch.manual_seed(seed)  # of dropout
    for one in islice(stream, case.before):
        model(*one.args).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    drawn = list(islice(stream, samples))
    inside, aside = split_by_source([one.source for one in drawn], HOLDOUT, seed)
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder)
        moments = _train(model, optimizer, drawn, aside, traces)
        labels = _labels(traces / "steps")
        vocabulary = build_vocabulary([labels[i].calls for i in inside])
        examples = [encode_example(vocabulary, label) for label in labels]
        del labels
        again = [
            Again(step, abs(step - moment), tuple(encode_example(vocabulary, label).blocks))
            for moment, steps in moments.items()
            for step, label in zip(steps, _labels(traces / str(moment)), strict=True)
        ]
    return Recording(vocabulary, examples, aside, again)


def _labels(traces: Path) -> list[Label]:
    return label_traces(traces, 1, lambda *_: None)


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    drawn: Sequence[ZooSample],
    aside: Sequence[int],
    traces: Path,
) -> dict[int, list[int]]:
    """Train on all samples and return, by the moments at which that held still, which steps'
    samples were run again; traces are under ``steps`` and under the moments."""
    import torch

    from dynoffload.profiler.profiling import profile

    count = len(drawn)
    ends = [count * (number + 1) // MOMENTS for number in range(MOMENTS)]
    begin, found = 0, {}
    for end in dict.fromkeys(ends):
        moment = (begin + end) // 2
        for part in (slice(begin, moment), slice(moment, end)):
            if part.start == moment and (near := [s for s in aside if begin <= s < end]):
                found[moment] = near
                with torch.random.fork_rng(devices=[]):
                    again = [drawn[step] for step in near]
                    profile(model, again, out=traces / str(moment), progress=False)
            if drawn[part]:
                steps = traces / "steps"
                profile(model, drawn[part], out=steps, optimizer=optimizer, progress=False)
        begin = end
    return found


@contextlib.contextmanager
def recorded(
    case: Case, samples: int, lr: float, report: Report, keep: Path | None = None
) -> Iterator[Path]:
    """Yield a directory with the traces of ``samples`` training steps.

    Args:
        case: what to train.
        samples: how many steps.
        lr: learning rate; the routing of an MoE drifts by it, and pilots must live with that.
        report: told how far it is.
        keep: where the traces stay; by default they are removed.
    """
    import torch

    from dynoffload.experiments import zoo
    from dynoffload.profiler.profiling import profile

    model = zoo.build(case.network, case.preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    drawn = islice(zoo.samples(case.network, "train", **case.shape), samples)

    def counted() -> Iterator[ZooSample]:
        for number, sample in enumerate(drawn):
            report(f"{case.key}: recording steps", number, samples)
            yield sample

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profile(model, counted(), out=folder, optimizer=optimizer, progress=False)
        yield folder
