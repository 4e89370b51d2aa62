"""Mutated pilots and traces, loaded and used in children that may not do what data never needs.

What it is: `fuzz`, and the command of `make fuzz`. Each file is made from a real one by a seeded
mutation, loaded, and used if it loads. It may work, or be refused by an error that names the file.
Anything else is a failure: another error, a warning, an answer that is not well-formed, too much
processor time or memory, the end of the process, a file opened for writing, code that is compiled
or executed, a module that is imported, a process or a socket. What it is not: a search guided by
coverage.

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
from time import monotonic, process_time
from typing import Any

from fuzz_pilots import PilotMutator
from fuzz_seeds import Seeds, make_seeds
from fuzz_traces import TraceMutator
from fuzz_uses import Good, Malformed, Unnamed, use_pilot, use_trace
from synthetic_pilot import label_of

from dynoffload.errors import DynOffloadError
from dynoffload.pilot.labels import Label
from dynoffload.profiler.program import resolve
from dynoffload.profiler.storage import load_trace
from dynoffload.units import MiB

BATCH = 500
"""Files that one child uses."""
CPU_S = 5
"""Processor seconds that one file may take."""
MEMORY = 512 * MiB
"""Bytes that a file may take beyond what the process has."""
LEARNED = 6
"""Of so many traces, one is merged, teaches a pilot, and is saved again."""

_FORBIDDEN = frozenset(
    "exec compile import subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork"
    " os.forkpty os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.chmod os.truncate"
    " os.kill pickle.find_class marshal.loads ctypes.dlopen shutil.rmtree".split()
)


@dataclass
class Tally:
    """What came of the files.

    Attributes:
        outcomes: by kind of mutation and outcome.
        slowest: processor seconds of the slowest file of each kind.
        largest: bytes of memory that a file of each kind took at most.
        failures: the number, kind and outcome of each failure.
        seconds: how long it all took.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, row: dict[str, Any]) -> None:
        """Count one file."""
        kind, outcome = row["kind"], row["outcome"]
        self.outcomes[kind, outcome] += 1
        self.slowest[kind] = max(self.slowest[kind], row["seconds"])
        self.largest[kind] = max(self.largest[kind], row["bytes"])
        if outcome not in ("works", "refused"):
            self.failures.append(row)

    def to_json(self) -> dict[str, Any]:
        """Return all but the failures' stacks as plain data."""
        rows = {
            kind: {
                **{o: n for (k, o), n in sorted(self.outcomes.items()) if k == kind},
                "slowest_s": round(self.slowest[kind], 3),
                "largest_bytes": self.largest[kind],
            }
            for kind in sorted({kind for kind, _ in self.outcomes})
        }
        totals: Counter[str] = Counter()
        for (_, outcome), count in self.outcomes.items():
            totals[outcome] += count
        return {
            "files": totals.total(),
            "outcomes": dict(sorted(totals.items())),
            "failures": [{k: v for k, v in f.items() if k != "stack"} for f in self.failures],
            "slowest_s": round(max(self.slowest.values(), default=0.0), 3),
            "largest_bytes": max(self.largest.values(), default=0),
            "limits": {"cpu_s": CPU_S, "bytes": MEMORY},
            "files_per_second": round(totals.total() / max(self.seconds, 1e-9), 1),
            "mutations": rows,
        }

    def table(self) -> str:
        """Return the counts as text."""
        head = ("mutation", "works", "refused", "failed", "slowest", "memory")
        lines = ["{:28} {:>7} {:>8} {:>7} {:>9} {:>10}".format(*head)]
        for kind in sorted({kind for kind, _ in self.outcomes}):
            counts = {o: n for (k, o), n in self.outcomes.items() if k == kind}
            good = counts.pop("works", 0), counts.pop("refused", 0)
            lines.append(
                f"{kind:28} {good[0]:7} {good[1]:8} {sum(counts.values()):7} "
                f"{self.slowest[kind]:8.2f}s {self.largest[kind] / MiB:6.1f} MiB"
            )
        return "\n".join(lines)


class Fuzzer:
    """Makes case after case.

    Args:
        seeds: the undamaged files.
        seed: of all mutations.
        folder: to write into.
    """

    def __init__(self, seeds: Seeds, seed: int, folder: Path) -> None:
        self._seeds, self._seed, self._folder = seeds, seed, folder
        self._pilots = PilotMutator({name: path for name, (path, _) in seeds.pilots.items()})
        self._traces = TraceMutator({name: paths[0] for name, paths in seeds.traces.items()})
        labels: dict[str, list[Label]] = {}
        for paths in seeds.traces.values():
            for path in paths[1:4]:
                trace = load_trace(path)
                labels.setdefault(trace.network, []).append(label_of(resolve(trace)))
        self._good = Good(labels)
        self._hook_on = False
        self._caught: list[str] = []

    def file(self, case: int) -> tuple[str, str, bytes]:
        """Return the name, the kind of mutation and the bytes of a case: even ones are pilots."""
        chance = random.Random(f"{self._seed}:{case}")
        return (self._traces if case % 2 else self._pilots).make(chance)

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
            except (Malformed, Unnamed) as error:
                outcome, stack = type(error).__name__.lower(), str(error)
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
            use_trace(path, self._good, self._folder, learn=case // 2 % LEARNED == LEARNED - 1)
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
    start = monotonic()
    case, stop = first, first + count
    while case < stop:
        case = _batch(fuzzer, case, min(case + BATCH, stop), tally, keep)
        if sys.stderr.isatty() or case % 10_000 == 0:
            sys.stderr.write(f"{case - first} of {count}, {len(tally.failures)} failures\n")
    tally.seconds = monotonic() - start
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
    sys.stdout.write(tally.table() + "\n")
    made = {"command": f"make fuzz  # seed {options.seed}", **tally.to_json()}
    short = {name: value for name, value in made.items() if name not in ("mutations", "failures")}
    sys.stdout.write(json.dumps(short) + "\n")
    if options.json:
        options.json.write_text(json.dumps(made, indent=2) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
