"""How well pilots predict block orders, over the whole zoo, on sources they have not seen.

What it is: every network of the zoo whose steps differ is trained and recorded, at several seeds
(of the weights, the samples, what is held out, and the pilots); each kind of pilot learns from
three quarters of the sources and is scored on the rest beside the baselines it must beat; and each
network is foretold by a model that learned from the others alone. Accuracy is 1 - Levenshtein
distance / longer order, mean over samples.

What it is not: a measure of what a prediction is worth (`dynoffload.experiments.pilot_benefit`).

With ``--json PATH`` the figure is written beside it, as ``PATH`` with the suffix ``.svg``. Each
case at each seed is a process of its own; with ``--keep DIR`` what it found stays, and a run that
was ended goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.children import answer_of
from dynoffload.experiments.pilot_accuracy_run import LEAST, Task
from dynoffload.experiments.pilot_cases import CASES, Case, cases_named
from dynoffload.experiments.pilot_verdicts import summary, verdicts
from dynoffload.experiments.workers import WorkerError
from dynoffload.pilot.labels import makers_version
from dynoffload.pilot.models import KINDS
from dynoffload.pilot.progress import Report, progress_bar

if TYPE_CHECKING:
    from dynoffload.experiments.zoo.building import ZooSample

_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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

    import dynoffload
    from dynoffload.experiments import zoo

    model = zoo.build(case.network, case.preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    drawn = islice(zoo.samples(case.network, "train", **case.shape), samples)

    def counted() -> Iterator[ZooSample]:
        for number, sample in enumerate(drawn):
            report(f"{case.key}: recording steps", number, samples)
            yield sample

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dynoffload.profile(model, counted(), out=folder, optimizer=optimizer, progress=False)
        yield folder


def run(
    json_path: Path | None = None,
    *,
    only: tuple[str, ...] = (),
    seeds: int = 3,
    samples: int = 480,
    kinds: tuple[str, ...] = KINDS,
    jobs: int = 2,
    keep: Path | None = None,
    page: Path | None = None,
) -> dict[str, Any]:
    """Record, train and score.

    Args:
        json_path: the figure is written beside it.
        only: the cases to run, by key; without it all.
        seeds: how many, from 0.
        samples: recorded steps of each case.
        kinds: of pilots.
        jobs: processes at a time, each of one thread.
        keep: a directory in which each part's numbers stay, and the recordings; parts that this
            code has left there are not run again.
        page: a Markdown file to write.

    Raises:
        ConfigError: there is no such case or kind, a number is too small, or ``keep`` holds a part
            that was run otherwise.
        WorkerError: every part failed.
    """
    chosen = cases_named(only)
    _check(seeds, samples, kinds, jobs)
    if page is not None:
        make_room(page, "--page")
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report = stack.enter_context(progress_bar(True))
        parts = [
            _Part(f"{case.key}, seed {seed}", _task(folder, case, seed, samples, kinds))
            for seed in range(seeds)
            for case in chosen
        ]
        found, failed = _carry_out(parts, folder, jobs, report)
        if not found:
            raise WorkerError("no part could be run: " + "; ".join(failed.values()))
    result = _result(chosen, parts, found, failed, samples)
    _show(result, json_path, page)
    return result


def _check(seeds: int, samples: int, kinds: Sequence[str], jobs: int) -> None:
    """Refuse what cannot be run, before anything is."""
    if seeds < 1 or jobs < 1:
        raise ConfigError(f"seeds={seeds} and jobs={jobs} must be at least 1")
    if samples < LEAST:
        raise ConfigError(f"samples={samples} are too few to learn from: at least {LEAST}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(f"there is no kind of pilot {unknown}; there are {', '.join(KINDS)}")


@dataclass(frozen=True)
class _Part:
    """What one process does, and what messages call it."""

    name: str
    task: Task

    @property
    def file(self) -> str:
        """The name of the file of what it found."""
        return f"{self.task.case}-{self.task.samples}-{self.task.seed}.scores.json"

    @property
    def settings(self) -> dict[str, Any]:
        """What its numbers depend on, beside what the file's name says."""
        case = CASES[self.task.case]
        return {
            "case": asdict(case),
            "kinds": list(self.task.kinds),
            "code": _code(),
        }


@cache
def _code() -> str:
    """Return a digest of the code that traces, labels and pilots are made by."""
    from dynoffload import pilot

    digest = hashlib.sha256(makers_version().encode())
    for folder in pilot.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _task(folder: Path, case: Case, seed: int, samples: int, kinds: Sequence[str]) -> Task:
    recording = folder / f"{case.key}-{samples}-{seed}-{makers_version()[:12]}.recording"
    return Task(case.key, seed, samples, str(recording.resolve()), kinds)


def _carry_out(
    parts: Sequence[_Part], folder: Path, jobs: int, report: Report
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what each part found, by its name, and why the others did not."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    done, lock = 0, Lock()

    def carry_out(part: _Part) -> None:
        nonlocal done
        try:
            answer = _kept(part, folder)
        except WorkerError as error:
            with lock:
                failed[part.name] = str(error)
        else:
            with lock:
                found[part.name] = answer
        with lock:
            done += 1
            report(f"{part.name}: done", done, len(parts))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(carry_out, parts))
    return found, failed


def _kept(part: _Part, folder: Path) -> dict[str, Any]:
    """Return what a part found: now, or in a run before.

    Raises:
        ConfigError: it was run with other settings, or by other code.
        WorkerError: it failed.
    """
    path = folder / part.file
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["settings"] != json.loads(json.dumps(part.settings)):
            raise ConfigError(
                f"{path} is of a run with other settings, or by other code ({kept['settings']}): "
                "name another directory for --keep, or remove the file"
            )
        answer: dict[str, Any] = kept["found"]
        return answer
    answer = answer_of("pilot_accuracy_run", part.task, part.name, environment=_THREADS)
    write_json(path, {"settings": part.settings, "found": answer})
    return answer


def _result(
    chosen: Sequence[Case],
    parts: Sequence[_Part],
    found: Mapping[str, Any],
    failed: Mapping[str, str],
    samples: int,
) -> dict[str, Any]:
    """Return all numbers, with their means, spreads and verdicts."""
    cases: dict[str, Any] = {}
    for case in chosen:
        mine = [part for part in parts if part.task.case == case.key and part.name in found]
        if mine:
            of_seeds = [found[part.name] for part in mine]
            cases[case.key] = {
                **asdict(case),
                "summary": summary(case.origin, of_seeds),
                "seeds": {str(p.task.seed): one for p, one in zip(mine, of_seeds, strict=True)},
            }
    return {
        "samples": samples,
        "seeds": len({part.task.seed for part in parts}),
        "cases": cases,
        "failed": dict(failed),
        "verdicts": verdicts(cases),
    }


def _show(result: Mapping[str, Any], json_path: Path | None, page: Path | None) -> None:
    from dynoffload.experiments.pilot_accuracy_views import page_of, show, write_figure

    show(result)
    figure = None if json_path is None else json_path.with_suffix(".svg")
    if figure is not None:
        write_figure(result, figure)
    if page is not None:
        page.write_text(page_of(result, "" if figure is None else figure.name), encoding="utf-8")
