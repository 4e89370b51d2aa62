"""Mutated pilots and traces do no harm; and the fuzzer sees harm where there is some."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch
from fuzzing import Fuzzer, Seeds, fuzz

from dynoffload.datasets.trees import trees
from dynoffload.experiments import zoo
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.labels import encode_example, label_traces
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler.profiling import profile


class Batch:
    """Arguments of a forward, and the source that they are from."""

    def __init__(self, source: str, *args: Any) -> None:
        self.args, self.source = args, source


class Exits(torch.nn.Module):
    """Layers, of which a sample runs as many as its mean says, and cells in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(8))
        self.cells = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 2 + 2 * min(3, int(x.mean().abs() * 3))]:
            x = torch.tanh(layer(x))
        rounds = int(x.detach().abs().sum() * 10) % 5
        for number in range(rounds):
            x = torch.tanh(self.cells[(rounds + number) % 2](x))
        out: torch.Tensor = self.head(x).sum()
        return out


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    """Traces of small networks, and pilots from them."""
    folder = tmp_path_factory.mktemp("seeds")
    torch.manual_seed(0)
    exits = Exits()
    tokens = [Batch(f"{step % 4}", *(torch.randint(40, 60, (1, 3)),) * 2) for step in range(12)]
    nodes = [Batch(t.source, t) for t in islice(trees(min_nodes=3, max_nodes=8, seed=0), 12)]
    numbers = [Batch(f"{step % 6}", torch.randn(2, 6) * (1 + step % 5)) for step in range(48)]
    made: dict[str, tuple[torch.nn.Module, list[Batch], Any]] = {
        "moe": (zoo.build("moe", "tiny", layers=1, experts=3, width=8), tokens, None),
        "tree": (zoo.build("tree", "tiny", embedding=8, hidden=8), nodes, None),
        "exits": (exits, numbers, torch.optim.AdamW(exits.parameters())),
    }
    found = Seeds({}, {})
    for network, (model, batches, optimizer) in made.items():
        out = folder / network
        found.traces[network] = profile(
            model, batches, optimizer=optimizer, out=out, progress=False
        )
        labels = label_traces(out, 1, lambda *_: None)
        vocabulary = build_vocabulary([label.calls for label in labels])
        examples = [encode_example(vocabulary, label) for label in labels]
        path = folder / f"{network}.pilot"
        fit_pilot(vocabulary, examples).save(path)
        found.pilots[network] = (path, examples[:3])
    return found


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_work_or_are_refused_in_words(
    seeds: Seeds, tmp_path: Path, count: int
) -> None:
    """``Fuzzer(seeds, 1, folder).run(case)`` repeats one that does neither."""
    fuzzer = Fuzzer(seeds, 1, tmp_path)
    fuzzer.warm()
    outcomes = fuzz(fuzzer, count)
    for kind in ("pilot document", "pilot arrays", "trace document", "trace arrays"):
        assert outcomes[kind, "works"]
        assert outcomes[kind, "refused"]


def _hang(*_: Any) -> None:
    while True:
        pass


HARM: dict[str, Callable[..., Any]] = {
    "RuntimeWarning": lambda *_: warnings.warn("overflow", RuntimeWarning, stacklevel=1),
    "MemoryError": lambda *_: b"x" * (2 * fuzzing.MEMORY),
    "status 27": _hang,  # SIGPROF
    "status 6": lambda *_: os.abort(),
    "Malformed: compile": lambda *_: eval("1 + 1"),
    "Malformed: open": lambda *_: Path("/dev/null").write_text("x"),
}


@pytest.mark.parametrize("told", HARM)
def test_harm_is_seen(
    told: str, seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "use_pilot", HARM[told])
    monkeypatch.setattr(fuzzing, "CPU_S", 0.2)
    with pytest.raises(AssertionError, match=f"^case 0, .*{told}"):
        fuzz(Fuzzer(seeds, 0, tmp_path), 3)
