"""Recorded training steps of zoo networks, from which pilots are trained."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dynoffload.experiments.ways import Spec, adamw, network
from dynoffload.pilot.progress import Report
from dynoffload.pilot.train import TrainResult, train_pilot

if TYPE_CHECKING:
    from dynoffload.experiments.zoo.building import ZooSample

STRUCTURE, DATA = "structure", "data"
"""What determines a step's path: the sample, or the network's computation."""
_LATE = 32  # last recorded steps; the largest gives the footprint


@dataclass(frozen=True)
class Case:
    """One network with one shape of samples.

    Attributes:
        key: of its numbers in the JSON.
        network: name in the zoo.
        preset: its sizes.
        shape: of its samples.
        title: in tables.
        origin: `STRUCTURE` or `DATA`.
        lr: AdamW's learning rate.
        before: training steps before the recording, so that paths vary: an untrained network is
            never sure enough to take an early exit.
        share: recorded share of the requested samples; below 1 if steps are slow and one number
            determines the path.
    """

    key: str
    network: str
    preset: str = "tiny"
    shape: dict[str, int] = field(default_factory=dict)
    title: str = ""
    origin: str = DATA
    lr: float = 3e-4
    before: int = 0
    share: float = 1.0


def _structure(key: str, network: str, title: str, preset: str = "tiny", share: float = 1) -> Case:
    return Case(key, network, preset, title=title, origin=STRUCTURE, share=share)


def _experts(key: str, network: str, preset: str, length: int, title: str) -> Case:
    return Case(key, network, preset, {"length": length}, f"{title}, {length} tokens")


CASES: dict[str, Case] = {
    case.key: case
    for case in (
        _structure("tree", "tree", "Child-Sum Tree-LSTM"),
        _structure("tree_untied", "tree", "Tree-LSTM, 12 cells by kind", "tiny-untied"),
        _structure("gan", "gan", "unrolled GAN"),
        _structure("evoformer", "evoformer", "Evoformer, recycling"),
        _structure("esmfold", "esmfold", "ESMFold, recycling", share=0.25),
        Case("early_lstm", "early-lstm", title="early-ending LSTM", lr=1e-3, before=1000),
        _experts("switch_32", "switch", "tiny", 64, "Switch, 32 experts"),
        _experts("switch_128", "switch", "tiny-128", 64, "Switch, 128 experts"),
        _experts("moe_8", "moe", "tiny-wide", 8, "top-2 of 64"),
        _experts("moe_64", "moe", "tiny-wide", 64, "top-2 of 64"),
        _experts("moe_512", "moe", "tiny-wide", 512, "top-2 of 64"),
        Case("exits", "exits", title="multi-scale exits", before=700),
        Case(
            "depths",
            "depths",
            shape={"length": 16},
            title="mixture of depths, 16 tokens",
            lr=1e-3,
            before=100,
        ),
    )
}
"""All networks of the zoo whose steps differ, by key, at the smallest sizes: difficulty depends on
the number of codes and sites, not on size."""


@contextlib.contextmanager
def recorded(spec: Spec, samples: int, report: Report, *, before: int = 0) -> Iterator[Path]:
    """Yield a temporary directory with the traces of plain training steps.

    Args:
        spec: what is trained; its learning rate determines how fast the routing of an MoE drifts,
            which pilots must tolerate.
        samples: number of steps.
        report: called with the progress.
        before: training steps before the recorded ones.
    """
    import torch

    from dynoffload.experiments import zoo
    from dynoffload.profiler.profiling import profile

    model = network(spec)
    optimizer = adamw(model, spec)
    stream = zoo.samples(spec.network, "train", seed=spec.data_seed, **spec.shape)
    torch.manual_seed(spec.seed)  # of dropout
    for one in islice(stream, before):
        model(*one.args).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def counted() -> Iterator[ZooSample]:
        for number, sample in enumerate(islice(stream, samples)):
            report(f"{spec.network}: recording steps", number, samples)
            yield sample

    with tempfile.TemporaryDirectory() as folder:
        profile(model, counted(), out=folder, optimizer=optimizer, progress=False)
        yield Path(folder)


def learned(spec: Spec, samples: int, report: Report, path: Path) -> tuple[int, TrainResult]:
    """Record steps and train a pilot into ``path``. Return the footprint of a step in bytes (the
    largest of the last recorded ones) and the training's result."""
    from dynoffload.planning.footprint import footprint
    from dynoffload.profiler import load_trace, trace_files

    with recorded(spec, samples, report) as traces:
        report(f"{spec.network}: learning a pilot")
        trained = train_pilot(traces, progress=False)
        trained.pilot.save(path)
        # A parameter's optimizer state appears with its first gradient, so late steps have most.
        late = trace_files(traces)[-_LATE:]
        return max(footprint(load_trace(trace)) for trace in late), trained
