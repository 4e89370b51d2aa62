"""The real files that are mutated: traces of small networks, and pilots of every kind from them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from dynoffload.datasets.trees import trees
from dynoffload.experiments import zoo
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.labels import encode_example, label_traces
from dynoffload.pilot.models import KINDS
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler.profiling import profile

SOURCES = ("a.py", "b.py", "c.py", "d.py")


@dataclass(frozen=True)
class Seeds:
    """What mutations start from.

    Attributes:
        pilots: pilot files by name, with examples of the network each is for.
        traces: the traces of each network, by its name.
    """

    pilots: dict[str, tuple[Path, list[Example]]]
    traces: dict[str, list[Path]]


class Tokens:
    """A batch of tokens from one of a few sources, each with an alphabet of its own."""

    def __init__(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.args = (torch.randint(40, 60, (1, 3), generator=generator),) * 2
        self.source = SOURCES[step % len(SOURCES)]


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


def make_seeds(folder: Path) -> Seeds:
    """Record and train what is mutated, into a folder."""
    torch.manual_seed(0)
    routed = zoo.build("moe", "tiny", layers=1, experts=3, width=8)
    cells = zoo.build("tree", "tiny", embedding=8, hidden=8)
    exits = Exits()
    nodes = [
        type("Batch", (), {"args": (tree,), "source": tree.source})()
        for tree in islice(trees(min_nodes=3, max_nodes=8, seed=0), 12)
    ]
    numbers = [
        type(
            "Batch", (), {"args": (torch.randn(2, 6) * (1 + step % 5),), "source": f"{step % 6}"}
        )()
        for step in range(48)
    ]
    traces = {
        "moe": profile(routed, map(Tokens, range(12)), out=folder / "moe", progress=False),
        "tree": profile(cells, nodes, out=folder / "tree", progress=False),
        "exits": profile(
            exits,
            numbers,
            optimizer=torch.optim.AdamW(exits.parameters()),
            out=folder / "exits",
            progress=False,
        ),
    }
    pilots = {}
    chosen = {"moe": ("lightgbm", "sequence"), "exits": KINDS, "tree": ("markov",)}
    for network, kinds in chosen.items():
        labels = label_traces(folder / network, 1, lambda *_: None)
        vocabulary = build_vocabulary([label.calls for label in labels])
        examples = [encode_example(vocabulary, label) for label in labels]
        for kind in kinds:
            path = folder / f"{network}-{kind}.pilot"
            fit_pilot(vocabulary, examples, model=kind).save(path)
            pilots[path.stem] = (path, examples[:3])
    return Seeds(pilots, traces)
