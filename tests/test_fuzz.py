"""Mutated pilots and traces: each works, or is refused by an error that names the file.

A file is made from a real one, loaded, and used as users' commands do if it loads. Any other error,
a warning, or more than a little time or memory is a failure.
"""

from __future__ import annotations

import marshal
import os
import pickle
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_files import mutated

from dynoffload.datasets.trees import trees
from dynoffload.errors import DynOffloadError, PilotError
from dynoffload.experiments import zoo
from dynoffload.pilot import pilot as pilot_file
from dynoffload.pilot.evidence import IDIOMS
from dynoffload.pilot.features import Example
from dynoffload.pilot.labels import Label, encode_example, label_traces, make_label
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import learn_pilot
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.planning.footprint import footprint, temporaries
from dynoffload.profiler import storage
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.profiling import profile
from dynoffload.profiler.storage import load_trace, save_trace
from dynoffload.units import MiB

LEARNED = 12  # of which one case trains a pilot on its trace
CPU_S = 5  # that one file may take
MEMORY = 512 * MiB  # that all may take beyond what this process has
MAX_TOLD = 60  # blocks of a step that a pilot is told
STRANGE = (
    InputFeatures({}),
    InputFeatures({"a": float("nan"), "nodes": 1e308}, np.array([[2**62, -(2**62)], [0, 1]])),
    InputFeatures({"x": float("-inf")}, np.arange(3000) % 50),
)
"""Samples that no recorded network shows."""


@dataclass(frozen=True)
class Seeds:
    """What mutations start from: pilot files with examples of their networks, and traces, by the
    network's name."""

    pilots: dict[str, tuple[Path, list[Example]]]
    traces: dict[str, list[Path]]


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
        learn_pilot(vocabulary, examples).save(path)
        found.pilots[network] = (path, examples[:3])
    return found


class Harm(BaseException):
    """What no file may lead to; nothing that catches errors takes it for one."""


_FORBIDDEN = frozenset(
    "exec compile marshal.loads pickle.find_class ctypes.dlopen subprocess.Popen shutil.rmtree"
    " os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill os.remove os.rename"
    " os.mkdir os.rmdir os.link os.symlink os.chmod os.truncate".split()
)
_folder: str | None = None
_hooked: list[bool] = []


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what data never needs, but for files in the folder while `watched` is on."""
    if _folder is None or (args and str(args[0]).startswith(_folder)):
        return
    bad = event in _FORBIDDEN or event.startswith("socket.")
    if event == "import":
        bad = args[0] not in sys.modules
    elif event == "open" and not isinstance(args[0], int):  # a number was opened before
        bad = bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if bad:
        raise Harm(f"{event} {str(args)[:200]}")


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise `Harm` as something is executed, imported, sent, or written outside the folder."""
    global _folder
    if not _hooked:
        sys.addaudithook(_refuse)  # it stays
        _hooked.append(True)
    _folder = str(folder)
    try:
        yield
    finally:
        _folder = None


@pytest.mark.parametrize(
    ("event", "harm"),
    [
        ("compile", lambda: eval("1 + 1")),
        ("exec", lambda: exec((lambda: None).__code__)),
        ("import", lambda: __import__("no_such_module")),
        ("marshal.loads", lambda: marshal.loads(marshal.dumps(1))),
        ("pickle.find_class", lambda: pickle.loads(pickle.dumps(Path))),
        ("open", lambda: Path("/dev/null").write_text("x")),
        ("os.remove", lambda: Path("/nowhere/file").unlink()),
        ("os.rename", lambda: Path("/nowhere/file").rename("/nowhere/other")),
        ("subprocess.Popen", lambda: subprocess.run(["true"], check=True)),
        ("socket", socket.socket),
    ],
)
def test_harm_is_seen(event: str, harm: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(Harm, match=f"^{event}"), watched(tmp_path):
        harm()


@pytest.fixture
def _limited() -> Iterator[None]:
    """Limit the memory that this process may take."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_work_or_are_refused_in_words(
    seeds: Seeds, tmp_path: Path, count: int
) -> None:
    """Even cases are pilots; the seed of a case is its number."""
    labels = {
        network: [made for made in map(make_label, map(str, paths[1:4])) if isinstance(made, Label)]
        for network, paths in seeds.traces.items()
    }
    by_name = {label.calls.network: known for known in labels.values() for label in known}
    for name, paths in seeds.traces.items():  # imports what is imported at first use
        use_pilot(Path(shutil.copy(seeds.pilots[name][0], tmp_path)), seeds.pilots[name][1])
        use_trace(Path(shutil.copy(paths[0], tmp_path)), by_name, learn=True)
    outcomes: Counter[tuple[str, str]] = Counter()
    for case in range(count):
        chance = random.Random(case)
        name, begin = chance.choice(list(seeds.pilots)), time.process_time()
        path = tmp_path / ("case.trace" if case % 2 else "case.pilot")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                if case % 2:
                    of = (storage.FORMAT, storage.SCHEMA_VERSION)
                    kind, data = mutated(chance, seeds.traces[name][0], of)
                    path.write_bytes(data)
                    with watched(tmp_path):
                        use_trace(path, by_name, learn=case % LEARNED == 1)
                else:
                    of = (pilot_file.FORMAT, pilot_file.VERSION)
                    kind, data = mutated(chance, seeds.pilots[name][0], of)
                    path.write_bytes(data)
                    with watched(tmp_path):
                        use_pilot(path, seeds.pilots[name][1])
            except DynOffloadError:
                outcomes[f"{path.suffix} {kind}", "refused"] += 1
            except BaseException as error:
                error.add_note(f"case {case}")
                raise
            else:
                outcomes[f"{path.suffix} {kind}", "works"] += 1
        assert time.process_time() - begin < CPU_S, f"case {case}"
    assert len(outcomes) == 8, f"a kind always works, or never: {outcomes}"


def use_pilot(path: Path, examples: Sequence[Example]) -> None:
    """Load a pilot, predict, follow steps, learn from them, and save it again."""
    pilot = _named(path, lambda: Pilot.load(path))
    size = len(pilot.vocabulary)
    with pytest.raises(PilotError):
        pilot.check("0" * 64 + pilot.vocabulary.network)
    samples = [*(example.sample for example in examples), *STRANGE]
    for sample in samples:
        _predict(pilot, sample)
    for example in examples:
        ran = [block if block < size else -1 for block in example.blocks]
        _follow(pilot, example.sample, ran)
        pilot.observe(example.sample, ran)
    for sample in STRANGE:
        pilot.observe(sample, [-1, *range(min(size, MAX_TOLD))])
    if _tried(lambda: [pilot.consolidate()]):
        _predict(pilot, samples[0])
    pilot.evidence.refit()
    again, last = (path.with_name(name) for name in ("again.pilot", "last.pilot"))
    pilot.save(again)
    loaded = Pilot.load(again)
    loaded.save(last)
    assert _predict(Pilot.load(last), samples[0]) == _predict(loaded, samples[0])


def _predict(pilot: Pilot, sample: InputFeatures) -> list[int]:
    pilot.unlike(sample)
    prediction = pilot.predict(sample)
    _check_blocks(prediction.blocks, len(pilot.vocabulary))
    surety = prediction.confidence
    assert surety is not None
    assert surety.shape == (len(prediction.blocks),)
    assert pilot.tracker is not None
    assert np.isfinite(pilot.features[: IDIOMS.start]).all()  # idioms may be unknown
    for told in (surety, pilot.tracker.chances):
        assert (np.isfinite(told) & (told >= 0) & (told <= 1)).all()
    return prediction.blocks


def _follow(pilot: Pilot, sample: InputFeatures, blocks: Sequence[int]) -> None:
    size = len(pilot.vocabulary)
    order = [*blocks[:MAX_TOLD], -1, *pilot.predict(sample).blocks[:MAX_TOLD]]
    step = pilot.tracker
    assert step is not None
    for place, block in enumerate(order):
        if place % 8 == 0:
            _check_blocks(step.expect()[0], size)
            hinted = list(range(min(size, 8)))
            step.hint(hinted, [0.5] * len(hinted))
        step.observe([block])
    _check_blocks(step.expect()[0], size)
    assert np.isfinite(step.chances).all()
    _check_blocks(pilot.glance(order).blocks, size)


def use_trace(path: Path, good: dict[str, list[Label]], *, learn: bool) -> None:
    """Load a trace, cut, encode and measure it, and save it again; ``learn``: train a pilot on it
    and on ``good`` ones of its network."""
    trace = _named(path, lambda: load_trace(path))
    label = make_label(str(path))
    assert isinstance(label, Label), label
    labels = [*good.get(trace.network, []), label]
    vocabulary = build_vocabulary([one.calls for one in labels], budget=1 << 20)
    examples = [encode_example(vocabulary, one) for one in labels]
    _check_blocks([b for b in examples[-1].blocks if b != -1], len(vocabulary))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    whole = _tried(lambda: footprint(trace))
    assert whole is None or min(whole, temporaries(trace)) >= 0
    pilot = _tried(lambda: learn_pilot(vocabulary, examples)) if learn else None
    if pilot is not None:
        _predict(pilot, label.sample)
    again = path.with_name("again.trace")
    save_trace(trace, again)
    assert load_trace(again).operators == trace.operators


def _tried(make: Callable[[], Any]) -> Any:
    """Return what is made, or None where it is refused in words."""
    try:
        return make()
    except DynOffloadError:
        return None


def _named(path: Path, load: Callable[[], Any]) -> Any:
    """Return what is loaded; a refusal must name the file."""
    try:
        return load()
    except DynOffloadError as error:
        if path.name not in str(error):
            raise AssertionError("a refusal that does not name its file") from error
        raise


def _check_blocks(blocks: Sequence[int], size: int) -> None:
    assert all(isinstance(block, int) and 0 <= block < size for block in blocks)
