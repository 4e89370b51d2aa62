"""Mutated pilots and traces, loaded and used in a child that may not do what data never needs.

Each file is made from a real one by a seeded mutation, loaded, and used as users' commands do if it
loads. It may work, or be refused by an error that names the file. Anything else is a failure.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_files import mutated

from dynoffload.errors import DynOffloadError, PilotError
from dynoffload.pilot import pilot as pilot_file
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.labels import Label, encode_example, make_label
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.planning.footprint import footprint, temporaries
from dynoffload.profiler import storage
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.storage import load_trace, save_trace
from dynoffload.units import MiB

LEARNED = 12  # of which one case trains a pilot on its trace
CPU_S = 5
"""Processor seconds that one file may take."""
MEMORY = 512 * MiB
"""Bytes that a child may take beyond what this process has."""
MAX_TOLD = 60
"""Blocks of a step that is followed that a pilot is told."""
STRANGE = (
    InputFeatures({}),
    InputFeatures({"a": float("nan"), "nodes": 1e308}, np.array([[2**62, -(2**62)], [0, 1]])),
    InputFeatures({"x": float("-inf")}, np.arange(3000) % 50),
)
"""Samples that no recorded network shows."""
_FORBIDDEN = frozenset(
    "exec compile import subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork"
    " os.forkpty os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.chmod os.truncate"
    " os.kill pickle.find_class marshal.loads ctypes.dlopen shutil.rmtree".split()
)


class Malformed(Exception):
    """A file was taken for good, and what came of it is not; or a refusal does not name it."""


@dataclass(frozen=True)
class Seeds:
    """What mutations start from.

    Attributes:
        pilots: pilot files by name, with examples of the network each is for.
        traces: the traces of each network, by its name.
    """

    pilots: dict[str, tuple[Path, list[Example]]]
    traces: dict[str, list[Path]]


class Fuzzer:
    """Makes case after case.

    Args:
        seeds: the undamaged files.
        seed: of all mutations.
        folder: to write into.
    """

    def __init__(self, seeds: Seeds, seed: int, folder: Path) -> None:
        self._seeds, self._seed, self._folder = seeds, seed, folder
        self._labels: dict[str, list[Label]] = {}
        for paths in seeds.traces.values():
            for made in map(make_label, map(str, paths[1:4])):
                assert isinstance(made, Label)
                self._labels.setdefault(made.calls.network, []).append(made)
        self._hook_on = False

    def warm(self) -> None:
        """Use each undamaged file: what is imported when it is first needed is there then."""
        for name, (path, _) in self._seeds.pilots.items():
            self._use(0, name, path)
        for name, paths in self._seeds.traces.items():
            self._use(1, name, paths[0])

    def run(self, case: int) -> tuple[str, str]:
        """Make, load and use one file, in this process; even cases are pilots.

        Returns:
            The kind of mutation, and whether the file ``"works"`` or is ``"refused"``. All else
            is raised.
        """
        chance = random.Random(f"{self._seed}:{case}")
        sort, of = "pilot", (pilot_file.FORMAT, pilot_file.VERSION)
        known = {name: path for name, (path, _) in self._seeds.pilots.items()}
        if case % 2:
            sort, of = "trace", (storage.FORMAT, storage.SCHEMA_VERSION)
            known = {name: paths[0] for name, paths in self._seeds.traces.items()}
        name = chance.choice(list(known))
        kind, data = mutated(chance, known[name], of)
        path = self._folder / f"case.{sort}"
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._hook_on = True
            try:
                self._use(case, name, path)
            except DynOffloadError:
                return f"{sort} {kind}", "refused"
            finally:
                self._hook_on = False
        return f"{sort} {kind}", "works"

    def _use(self, case: int, name: str, path: Path) -> None:
        if case % 2:
            use_trace(path, self._labels, self._folder, learn=case % LEARNED == 1)
        else:
            use_pilot(path, self._seeds.pilots[name][1], self._folder)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse what a data file must never lead to; what is saved again goes to the folder."""
        if not self._hook_on:
            return
        inside = bool(args) and str(args[0]).startswith(str(self._folder))
        bad = event.startswith("socket.") or event in _FORBIDDEN
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            # A number is of a file that was opened, and looked at, before.
            bad = bool(writes) and not isinstance(path, int)
        elif event == "import":
            bad = args[0] not in sys.modules
        if bad and not inside:
            raise Malformed(f"{event} {str(args)[:200]}")


def use_pilot(path: Path, examples: Sequence[Example], folder: Path) -> None:
    """Load a pilot, predict, follow steps, learn on, and save it again."""
    pilot = _named(path, lambda: Pilot.load(path))
    try:
        pilot.check("0" * 64 + pilot.vocabulary.network)
    except PilotError:
        pass
    else:
        raise Malformed("a pilot that knows every network")
    samples = [*(example.sample for example in examples), *STRANGE]
    for sample in samples:
        _predict(pilot, sample)
    for example in examples[:2]:
        _follow(pilot, example)
    learner = OnlineLearner(pilot.vocabulary, pilot=pilot, grow=False)
    size = len(pilot.vocabulary)
    for example in examples[:1]:
        learner.predict(example.sample)
        learner.observe(example.sample, [b if b < size else -1 for b in example.blocks])
    again = folder / "again.pilot"
    pilot.save(again)
    if _predict(Pilot.load(again), samples[0]) != _predict(pilot, samples[0]):
        raise Malformed("a pilot that predicts otherwise once it is saved")


def _predict(pilot: Pilot, sample: InputFeatures) -> list[int]:
    pilot.unlike(sample)
    prediction = pilot.predict(sample)
    _check_blocks(prediction.blocks, len(pilot.vocabulary))
    surety = prediction.confidence
    if surety is None or surety.shape != (len(prediction.blocks),):
        raise Malformed("confidence of another length than the blocks")
    for told in (surety, pilot.chances(sample)):
        if not (np.isfinite(told) & (told >= 0) & (told <= 1)).all():
            raise Malformed("chances that are none")
    return prediction.blocks


def _follow(pilot: Pilot, example: Example) -> None:
    size = len(pilot.vocabulary)
    step = StepTracker(pilot, example.sample)
    order = [*example.blocks[:MAX_TOLD], -1, *pilot.predict(example.sample).blocks[:MAX_TOLD]]
    for place, block in enumerate(order):
        if place % 8 == 0:
            _check_blocks(step.remaining(), size)
            hinted = list(range(min(size, 8)))
            step.hint(hinted, [0.5] * len(hinted))
        step.observe(block if block < size else -1)
    _check_blocks(step.remaining(), size)
    if not np.isfinite(step.chances).all():
        raise Malformed("chances that are none, within a step")


def use_trace(path: Path, good: dict[str, list[Label]], folder: Path, *, learn: bool) -> None:
    """Load a trace, resolve, cut, encode and measure it; now and then learn it, and save it again.

    Args:
        path: of the trace.
        good: labels of undamaged traces by their networks, that it is learned with.
        folder: to write into.
        learn: whether a pilot is trained on it.
    """
    trace = _named(path, lambda: load_trace(path))
    label = make_label(str(path))
    if not isinstance(label, Label):
        raise Malformed(f"a trace that loads, and gives no label: {label}")
    labels = [*good.get(trace.network, []), label]
    vocabulary = build_vocabulary([one.calls for one in labels], budget=1 << 20)
    example = encode_example(vocabulary, label)
    _check_blocks([b for b in example.blocks if b != -1], len(vocabulary))
    if Vocabulary.from_json(vocabulary.to_json()) != vocabulary:
        raise Malformed("a vocabulary that does not come back")
    whole = _tried(lambda: footprint(trace))
    if whole is not None and min(whole, temporaries(trace)) < 0:
        raise Malformed("a footprint below zero")
    examples = [encode_example(vocabulary, one) for one in labels]
    pilot = _tried(lambda: fit_pilot(vocabulary, examples)) if learn else None
    if pilot is not None:
        _predict(pilot, label.sample)
    again = folder / "again.trace"
    save_trace(trace, again)
    if load_trace(again).operators != trace.operators:
        raise Malformed("a trace that does not come back")


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
            raise Malformed(f"a refusal that does not name its file: {error}") from error
        raise


def _check_blocks(blocks: Sequence[int], size: int) -> None:
    if not all(isinstance(block, int) and 0 <= block < size for block in blocks):
        raise Malformed("a block outside the vocabulary")


def fuzz(fuzzer: Fuzzer, count: int) -> Counter[tuple[str, str]]:
    """Use ``count`` mutated files in a child; return how many of each kind work, and are refused.

    Raises:
        AssertionError: a file has done harm; it says which, and how.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            _child(fuzzer, count, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    done = [tuple(row) for row in found if isinstance(row, list)]
    assert len(done) == count, f"case {len(done)}, status {status}: {found[-1:]}"
    return Counter(done)


def _child(fuzzer: Fuzzer, count: int, writer: int) -> None:
    faulthandler.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(fuzzer.hook)
    try:
        for case in range(count):
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            row = fuzzer.run(case)
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(writer, (json.dumps(row) + "\n").encode())
    except BaseException:
        os.write(writer, (json.dumps(traceback.format_exc()) + "\n").encode())
