"""Recorded training steps of a network of the zoo, as a pilot learns from them."""

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
from dynoffload.pilot.labels import encode_example, label_traces
from dynoffload.pilot.progress import Report
from dynoffload.pilot.sources import split_by_source
from dynoffload.pilot.train import HOLDOUT
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary

if TYPE_CHECKING:
    from dynoffload.experiments.zoo.building import ZooSample


@dataclass(frozen=True)
class Recording:
    """What is kept of a case's training.

    Attributes:
        vocabulary: the network's blocks, cut from the steps that are learned from.
        examples: every step, in order.
        held_out: the numbers of the steps that scores are taken on, ascending.
    """

    vocabulary: Vocabulary
    examples: Sequence[Example]
    held_out: Sequence[int]

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
    with recorded(case, samples, case.lr, lambda *_: None, seed=seed) as traces:
        labels = label_traces(traces, 1, lambda *_: None)
    inside, aside = split_by_source([label.source for label in labels], HOLDOUT, seed)
    vocabulary = build_vocabulary([labels[i].calls for i in inside])
    return Recording(vocabulary, [encode_example(vocabulary, label) for label in labels], aside)


@contextlib.contextmanager
def recorded(
    case: Case,
    samples: int,
    lr: float,
    report: Report,
    keep: Path | None = None,
    *,
    seed: int = 0,
) -> Iterator[Path]:
    """Yield a directory with the traces of ``samples`` training steps.

    Args:
        case: what to train.
        samples: how many steps.
        lr: learning rate; the routing of an MoE drifts by it, and pilots must live with that.
        report: told how far it is.
        keep: where the traces stay; by default they are removed.
        seed: of the weights and of the samples' order.
    """
    import torch

    from dynoffload.experiments import zoo
    from dynoffload.profiler.profiling import profile

    model = zoo.build(case.network, case.preset, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    stream = zoo.samples(case.network, "train", seed=seed, **case.shape)
    torch.manual_seed(seed)  # of dropout
    for one in islice(stream, case.before):
        model(*one.args).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def counted() -> Iterator[ZooSample]:
        for number, sample in enumerate(islice(stream, samples)):
            report(f"{case.key}: recording steps", number, samples)
            yield sample

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profile(model, counted(), out=folder, optimizer=optimizer, progress=False)
        yield folder
