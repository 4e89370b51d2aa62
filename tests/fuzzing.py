"""Mutated pilots and traces, loaded and used in children that may not do what data never needs.

`fuzz` is the command of `make fuzz`. Each file is made from a real one by a seeded mutation,
loaded, and used as users' commands do if it loads. It may work, or be refused by an error that
names the file. Anything else is a failure: another error, a warning, an answer that is not
well-formed, too much processor time or memory, the end of the process, a file opened for writing,
code that is compiled or executed, a module that is imported, a process or a socket.

python tests/fuzzing.py --count 100000 --json docs/results/fuzz.json    # both kinds in turn
python tests/fuzzing.py --seed 0 --case 1234                           # one of them again
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from fuzz_files import Mutator
from fuzz_seeds import Seeds, make_seeds

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

BATCH = 500
"""Files that one child uses."""
CPU_S = 5
"""Processor seconds that one file may take."""
MEMORY = 512 * MiB
"""Bytes that a file may take beyond what the process has."""
LEARNED = 6
"""Of so many traces, one teaches a pilot, and is saved again."""
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


@dataclass
class Tally:
    """What came of the files.

    Attributes:
        outcomes: by kind of mutation and outcome.
        slowest: processor seconds of the slowest file.
        largest: bytes of memory that a file took at most.
        failures: the number, kind, outcome and stack of each failure.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: float = 0.0
    largest: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Count one file."""
        self.outcomes[row["kind"], row["outcome"]] += 1
        self.slowest = max(self.slowest, row["seconds"])
        self.largest = max(self.largest, row["bytes"])
        if row["outcome"] not in ("works", "refused"):
            self.failures.append(row)

    def to_json(self) -> dict[str, Any]:
        """Return all but the failures' stacks as plain data."""
        totals: Counter[str] = Counter()
        mutations: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.outcomes.items()):
            totals[outcome] += count
            mutations.setdefault(kind, {})[outcome] = count
        return {
            "files": totals.total(),
            "outcomes": dict(sorted(totals.items())),
            "failures": [{k: v for k, v in f.items() if k != "stack"} for f in self.failures],
            "slowest_s": round(self.slowest, 3),
            "largest_bytes": self.largest,
            "limits": {"cpu_s": CPU_S, "bytes": MEMORY},
            "mutations": mutations,
        }


class Fuzzer:
    """Makes case after case.

    Args:
        seeds: the undamaged files.
        seed: of all mutations.
        folder: to write into.
    """

    def __init__(self, seeds: Seeds, seed: int, folder: Path) -> None:
        self._seeds, self._seed, self._folder = seeds, seed, folder
        self._pilots = Mutator(
            {name: path for name, (path, _) in seeds.pilots.items()},
            (pilot_file.FORMAT, pilot_file.VERSION),
        )
        self._traces = Mutator(
            {name: paths[0] for name, paths in seeds.traces.items()},
            (storage.FORMAT, storage.SCHEMA_VERSION),
        )
        self._labels: dict[str, list[Label]] = {}
        for paths in seeds.traces.values():
            for made in map(make_label, map(str, paths[1:4])):
                assert isinstance(made, Label)
                self._labels.setdefault(made.calls.network, []).append(made)
        self._hook_on = False
        self._caught: list[str] = []

    def file(self, case: int) -> tuple[str, str, bytes]:
        """Return the name, the kind of mutation and the bytes of a case: even ones are pilots."""
        chance = random.Random(f"{self._seed}:{case}")
        name, kind, data = (self._traces if case % 2 else self._pilots).make(chance)
        return name, f"{'trace' if case % 2 else 'pilot'} {kind}", data

    def warm(self) -> None:
        """Use each undamaged file: what is imported when it is first needed is there then."""
        for name, (path, _) in self._seeds.pilots.items():
            self._use(0, name, path)
        for name, paths in self._seeds.traces.items():
            self._use(LEARNED * 2 - 1, name, paths[0])

    def run(self, case: int) -> dict[str, Any]:
        """Make, load and use one file, in this process, and say what came of it."""
        name, kind, data = self.file(case)
        path = self._folder / ("case.trace" if case % 2 else "case.pilot")
        path.write_bytes(data)
        del data
        before = _resident(reset=True)
        start = process_time()
        outcome, stack = "works", ""
        self._caught.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self._hook_on = True
            try:
                self._use(case, name, path)
            except Malformed as error:
                outcome, stack = "malformed", str(error)
            except DynOffloadError:
                outcome = "refused"
            except MemoryError:
                outcome, stack = "memory", traceback.format_exc()
            except Exception:
                outcome, stack = "error", traceback.format_exc()
            finally:
                self._hook_on = False
        if warned and outcome in ("works", "refused"):
            outcome, stack = (
                "warning",
                "".join(f"{w.filename}:{w.lineno} {w.message}\n" for w in warned),
            )
        if self._caught and outcome in ("works", "refused"):
            outcome, stack = "audit", "\n".join(self._caught)
        seconds = process_time() - start
        took = max(0, _resident() - before)
        return {"case": case, "name": name, "kind": kind, "outcome": outcome, "stack": stack,
                "seconds": seconds, "bytes": took}  # fmt: skip

    def _use(self, case: int, name: str, path: Path) -> None:
        if case % 2:
            use_trace(path, self._labels, self._folder, learn=case // 2 % LEARNED == LEARNED - 1)
        else:
            use_pilot(path, self._seeds.pilots[name][1], self._folder)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Note what a data file must never lead to; what is saved again goes to the folder."""
        if not self._hook_on:
            return
        if event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            # A number is of a file that was opened, and looked at, before.
            if writes and not isinstance(path, int) and not str(path).startswith(str(self._folder)):
                self._caught.append(f"open {path} {mode}")
        elif event == "import":
            if args[0] not in sys.modules:
                self._caught.append(f"import {args[0]}")
        elif event.startswith("socket.") or event in _FORBIDDEN:
            if event in ("os.rename", "os.remove", "os.chmod") and str(args[0]).startswith(
                str(self._folder)
            ):
                return
            self._caught.append(f"{event} {str(args)[:200]}")


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
    """Load a trace, resolve and cut it, encode it, measure it, and save it again.

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
    sizes = _tried(lambda: footprint(trace))
    if sizes is not None and min(sizes.total, sizes.need, temporaries(trace)) < 0:
        raise Malformed("a footprint below zero")
    if learn:
        examples = [encode_example(vocabulary, one) for one in labels]
        pilot = _tried(lambda: fit_pilot(vocabulary, examples))
        if pilot is not None:
            _predict(pilot, label.sample)
        again = folder / "again.trace"
        save_trace(trace, again)
        if load_trace(again).operators != trace.operators:
            raise Malformed("a trace that does not come back")


def _tried(make):  # type: ignore[no-untyped-def]
    """Return what is made, or None where it is refused in words."""
    try:
        return make()
    except DynOffloadError:
        return None


def _named(path, load):  # type: ignore[no-untyped-def]
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


def fuzz(seeds: Seeds, count: int, *, seed: int, folder: Path, keep: Path, first: int = 0) -> Tally:
    """Use ``count`` mutated files in children, and return what came of them.

    Args:
        seeds: what they are made of.
        count: how many.
        seed: of the mutations.
        folder: to work in.
        keep: where files that fail are kept.
        first: the number of the first.
    """
    fuzzer = Fuzzer(seeds, seed, folder)
    fuzzer.warm()
    tally = Tally()
    case, stop = first, first + count
    while case < stop:
        case = _batch(fuzzer, case, min(case + BATCH, stop), tally, keep)
        if sys.stderr.isatty() or case % 10_000 == 0:
            sys.stderr.write(f"{case - first} of {count}, {len(tally.failures)} failures\n")
    return tally


def _batch(fuzzer: Fuzzer, first: int, stop: int, tally: Tally, keep: Path) -> int:
    """Use files in one child; return the number of the next file for another one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            _child(fuzzer, first, stop, writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    done = first
    with os.fdopen(reader) as lines:
        for line in lines:
            row = json.loads(line)
            tally.add(row)
            if row["outcome"] not in ("works", "refused"):
                _keep(fuzzer, row, keep)
            done = row["case"] + 1
    _, status = os.waitpid(child, 0)
    if done >= stop:
        return stop
    name, kind, _ = fuzzer.file(done)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    outcome = "cpu" if number == signal.SIGPROF else "crash"
    row = {"case": done, "name": name, "kind": kind, "outcome": outcome, "seconds": 0.0, "bytes": 0,
           "stack": f"ended by {signal.Signals(number).name if number else status}"}  # fmt: skip
    tally.add(row)
    _keep(fuzzer, row, keep)
    return done + 1


def _child(fuzzer: Fuzzer, first: int, stop: int, writer: int) -> None:
    faulthandler.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(fuzzer.hook)
    for case in range(first, stop):
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        row = fuzzer.run(case)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writer, (json.dumps(row) + "\n").encode())


def _keep(fuzzer: Fuzzer, row: dict[str, Any], keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    _, _, data = fuzzer.file(row["case"])
    kind = "trace" if row["case"] % 2 else "pilot"
    (keep / f"{row['case']}.{kind}").write_bytes(data)
    (keep / f"{row['case']}.txt").write_text(f"{row['kind']}: {row['outcome']}\n{row['stack']}\n")


def _resident(*, reset: bool = False) -> int:
    """Return the most bytes of memory the process had at once; ``reset`` begins anew."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="mutated files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--case", type=int, help="use this one file, in this process")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="for files that fail")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    options = parser.parse_args(arguments)
    memory = Path("/dev/shm")  # where there is one: the files live for a moment
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    try:
        seeds = make_seeds(folder / "seeds")
        if options.case is not None:
            fuzzer = Fuzzer(seeds, options.seed, folder)
            fuzzer.warm()
            sys.addaudithook(fuzzer.hook)
            row = fuzzer.run(options.case)
            sys.stdout.write(row.pop("stack") + "\n" + json.dumps(row) + "\n")
            return int(row["outcome"] not in ("works", "refused"))
        where = {"folder": folder, "keep": options.keep}
        tally = fuzz(seeds, options.count, seed=options.seed, first=options.first, **where)
    finally:
        shutil.rmtree(folder)
    made = {"command": f"make fuzz  # seed {options.seed}", **tally.to_json()}
    sys.stdout.write(json.dumps(made, indent=2) + "\n")
    if options.json:
        options.json.write_text(json.dumps(made, indent=2) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
