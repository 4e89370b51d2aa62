"""Mutated pilots and traces, loaded and used in children that may not do what data never needs.

Each file is made from a real one by a seeded mutation, of its bytes or of what is in them with
digests made right, loaded, and used as users' commands do if it loads. It may work, or be refused
by an error that names the file. Anything else is a failure: another error, a warning, an answer
that is not well-formed, too much processor time or memory, the end of the process, a file opened
for writing, code that is compiled or executed, a module that is imported, a process or a socket.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
from dynoffload.profiler.safefile import digest_of, read_file
from dynoffload.profiler.storage import load_trace, save_trace
from dynoffload.units import MiB

LEARNED = 12  # of which one case trains a pilot on its trace
BATCH = 500
"""Files that one child uses."""
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
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, 2**62, 2**63, -(2**63)),
    *(10**30, 10**4000, 0.5, -0.5, 1e-300, 1e38, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "0", "1", "-1", "nan", "1e400", "\ud800", "\x00\x1b[2J", "é𝒳", "a" * 5000),
    *([], {}, [[]], [0], [-1], [None], {"a": 1}, [[[[[[[[[0]]]]]]]]], [0] * 300),
    {str(i): i for i in range(100)},
)
"""What stands where something else should."""
_NAMES = {"f2": "F16", "f4": "F32", "f8": "F64", "u1": "U8"} | {
    f"i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)
}
_EXTREMES = (0, 1, -1, 2, 127, -128, 255, 2**31, 2**62, -(2**62), 65_504.0, 3e38, -3e38, 1e-45)
_FORBIDDEN = frozenset(
    "exec compile import subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork"
    " os.forkpty os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.chmod os.truncate"
    " os.kill pickle.find_class marshal.loads ctypes.dlopen shutil.rmtree".split()
)


# Files


def pack(
    text: bytes, arrays: dict[str, Any], of: tuple[str, int], lie: random.Random | None = None
) -> bytes:
    """Return a file with a right digest; with ``lie`` its header lies in one place.

    Args:
        text: the document.
        arrays: the others.
        of: the kind of file, and its version.
        lie: draws the lie.
    """
    parts = {**arrays, "document": np.frombuffer(text, np.uint8)}
    parts = {
        name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in parts.items()
    }
    header: dict[str, Any] = {}
    body = b""
    for name, array in parts.items():
        data = array.tobytes()
        header[name] = {
            "dtype": _NAMES.get(array.dtype.str[1:], "C64"),
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    seal = {"sha256": digest_of(parts), "version": of[1]}
    header["__metadata__"] = {of[0]: json.dumps(seal)}
    described = text_of(header if lie is None else mutate_json(lie, header))
    length = len(described)
    if lie is not None and lie.random() < 0.1:
        length = lie.choice((0, 1, length - 1, length + 1, 2**20 + 1, 2**40, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + described + body


def text_of(document: Any) -> bytes:
    """Return a document as text."""
    return json.dumps(document, separators=(",", ":")).encode("utf-8", "surrogatepass")


def mutated(chance: random.Random, path: Path, of: tuple[str, int]) -> tuple[str, bytes]:
    """Return the kind of mutation, and a file made from an undamaged one."""
    kind = chance.choices(("bytes", "header", "document", "arrays"), (12, 12, 38, 38))[0]
    if kind == "bytes":
        return kind, damage(chance, path.read_bytes())
    document, arrays = read_file(path, *of)
    if kind == "document":
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            document = mutate_json(chance, document)
    if kind == "arrays":
        for _ in range(chance.choice((1, 1, 2, 4))):
            _mutate_arrays(chance, arrays)
    text = text_of(document)
    if chance.random() < 0.5:
        text = text.replace(b"Infinity", b"1e999")
    return kind, pack(text, arrays, of, chance if kind == "header" else None)


def damage(chance: random.Random, data: bytes) -> bytes:
    """Return bytes damaged without regard to what they mean."""
    made = bytearray(data)
    start = chance.randrange(len(made))
    stop = min(len(made), start + 1 + int(chance.expovariate(1 / 60)))
    how = chance.randrange(4)
    if how == 0:
        for _ in range(chance.randint(1, 8)):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif how == 1:
        del made[start:]
    elif how == 2:
        made[stop:stop] = data[start:stop] * chance.choice((1, 1, 30))
    else:
        made[start:stop] = bytes(stop - start)
    return bytes(made)


def mutate_json(chance: random.Random, document: Any) -> Any:
    """Return a document with one thing in it changed; what is not changed is shared."""
    if not document or not isinstance(document, dict | list):
        return document
    made = holder = copy.copy(document)
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not inner or not isinstance(inner, dict | list) or chance.random() < 0.15:
            break
        holder[key] = holder = copy.copy(inner)
    value = holder[key]
    how = chance.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder[key:key] = [value] * chance.choice((1, 2, 100))
    elif how == 2 and isinstance(value, list) and value:
        holder[key] = chance.sample(value, len(value))
    elif how == 3 and isinstance(value, int | float) and abs(value) < 1e30:
        holder[key] = chance.choice((value + 1, value - 1, -value, value * 10**9, str(value)))
    elif how == 4:
        holder[key] = [value] * chance.choice((1, 40))
    else:
        holder[key] = chance.choice(HOSTILE)
    return made


def _mutate_arrays(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change values, type, shape or presence of one array."""
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = np.array(arrays[name])
    how = chance.randrange(7)
    with np.errstate(all="ignore"):
        if how <= 2 and array.size:
            if chance.random() < 0.5:
                array = array.astype(f"{array.dtype.kind}8"[-2:])
            flat, extremes = array.reshape(-1), [*_EXTREMES, array.size, array.size - 1]
            if array.dtype.kind == "f":
                extremes += [math.nan, math.inf, -math.inf, 1.7e308]
            for _ in range(chance.choice((1, 1, 5, array.size))):
                value = chance.choice(extremes)
                if array.dtype.kind != "f":
                    info = np.iinfo(array.dtype)
                    value = min(max(int(value), info.min), info.max)
                flat[chance.randrange(array.size)] = value
        elif how == 3:
            array = array.astype(chance.choice(("i1", "i2", "i4", "i8", "f2", "f4", "f8", "u1")))
        elif how == 4 and array.size:
            array = np.resize(array, [max(1, n * chance.choice((1, 2))) for n in array.shape])
        elif how == 5:
            array = chance.choice((array.reshape(-1), array[None], array.T, array[:0]))
        else:
            del arrays[name]  # another has its place, if there is one
            for other in chance.sample(list(arrays), min(1, len(arrays))):
                arrays[other] = array
            return
    arrays[name] = array


# What is done with them


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
        self._caught: list[str] = []

    def file(self, case: int) -> tuple[str, str, bytes]:
        """Return the name, the kind of mutation and the bytes of a case: even ones are pilots."""
        chance = random.Random(f"{self._seed}:{case}")
        if case % 2:
            name = chance.choice(list(self._seeds.traces))
            of = (storage.FORMAT, storage.SCHEMA_VERSION)
            kind, data = mutated(chance, self._seeds.traces[name][0], of)
            return name, f"trace {kind}", data
        name = chance.choice(list(self._seeds.pilots))
        of = (pilot_file.FORMAT, pilot_file.VERSION)
        kind, data = mutated(chance, self._seeds.pilots[name][0], of)
        return name, f"pilot {kind}", data

    def warm(self) -> None:
        """Use each undamaged file: what is imported when it is first needed is there then."""
        for name, (path, _) in self._seeds.pilots.items():
            self._use(0, name, path)
        for name, paths in self._seeds.traces.items():
            self._use(1, name, paths[0])

    def run(self, case: int) -> dict[str, Any]:
        """Make, load and use one file, in this process, and say what came of it."""
        name, kind, data = self.file(case)
        path = self._folder / ("case.trace" if case % 2 else "case.pilot")
        path.write_bytes(data)
        del data
        outcome, stack = "works", ""
        self._caught.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self._hook_on = True
            try:
                self._use(case, name, path)
            except DynOffloadError:
                outcome = "refused"
            except BaseException as error:
                known = {Malformed: "malformed", MemoryError: "memory"}
                outcome, stack = known.get(type(error), "error"), traceback.format_exc()
            finally:
                self._hook_on = False
        if outcome in ("works", "refused") and (warned or self._caught):
            outcome = "warning" if warned else "audit"
            stack = "\n".join([*(f"{w.filename}:{w.lineno} {w.message}" for w in warned)])
            stack += "\n".join(self._caught)
        return {"case": case, "name": name, "kind": kind, "outcome": outcome, "stack": stack}

    def _use(self, case: int, name: str, path: Path) -> None:
        if case % 2:
            use_trace(path, self._labels, self._folder, learn=case % LEARNED == 1)
        else:
            use_pilot(path, self._seeds.pilots[name][1], self._folder)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Note what a data file must never lead to; what is saved again goes to the folder."""
        if not self._hook_on:
            return
        inside = bool(args) and str(args[0]).startswith(str(self._folder))
        if event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            # A number is of a file that was opened, and looked at, before.
            if writes and not isinstance(path, int) and not inside:
                self._caught.append(f"open {path} {mode}")
        elif event == "import":
            if args[0] not in sys.modules:
                self._caught.append(f"import {args[0]}")
        elif inside and event in ("os.rename", "os.remove", "os.chmod"):
            return
        elif event.startswith("socket.") or event in _FORBIDDEN:
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
    sizes = _tried(lambda: footprint(trace))
    if sizes is not None and min(sizes.total, sizes.need, temporaries(trace)) < 0:
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


# Children


def fuzz(fuzzer: Fuzzer, count: int) -> list[dict[str, Any]]:
    """Use ``count`` mutated files in children; return what came of each."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        found += _batch(fuzzer, len(found), min(len(found) + BATCH, count))
    return found


def _batch(fuzzer: Fuzzer, first: int, stop: int) -> list[dict[str, Any]]:
    """Use files in one child, up to one that ends it."""
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
    with os.fdopen(reader) as lines:
        found = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    if len(found) < stop - first:
        name, kind, _ = fuzzer.file(first + len(found))
        by_signal = os.WIFSIGNALED(status) and os.WTERMSIG(status)
        outcome = "cpu" if by_signal == signal.SIGPROF else "crash"
        row = {"case": first + len(found), "name": name, "kind": kind, "outcome": outcome}
        found.append({**row, "stack": f"ended by {by_signal or status}"})
    return found


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
