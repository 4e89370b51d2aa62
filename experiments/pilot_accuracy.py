"""How well pilots predict block orders, on source files they have not seen.

What it is: traces of training steps on real data, pilots of both kinds learned from some files and
scored on others, and the baselines they must beat on the same samples. Accuracy is 1 - Levenshtein
distance / longer order, mean over samples; "following" corrects itself after each step.

What it is not: a measure of what a prediction is worth (`dynoffload.experiments.pilot_stalls`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.errors import ConfigError
from dynoffload.experiments.trainer import finite
from dynoffload.pilot.progress import Report, progress_bar
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from dynoffload.experiments.zoo.building import ZooSample

KINDS = ("lightgbm", "mlp")


@dataclass(frozen=True)
class Case:
    """One network with one shape of samples.

    Attributes:
        key: where its numbers stand in the JSON.
        network: name in the zoo.
        preset: its sizes.
        shape: of its samples.
    """

    key: str
    network: str
    preset: str
    shape: dict[str, int] = field(default_factory=dict)


def cases(size: str) -> dict[str, Case]:
    """Return the cases by name, for networks of the presets ``size`` and ``size``-wide."""
    return {
        "tree": Case("tree", "tree", size),
        "moe_8": Case("moe_8", "moe", f"{size}-wide", {"length": 8}),
        "moe_64": Case("moe_64", "moe", f"{size}-wide", {"length": 64}),
    }


def chosen_cases(size: str, names: tuple[str, ...]) -> list[Case]:
    """Return the cases of ``names``.

    Raises:
        ConfigError: there is no such case.
    """
    known = cases(size)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"no case is named {unknown}; there are {', '.join(known)}")
    return [known[name] for name in names]


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
    only: tuple[str, ...] = ("tree", "moe_8", "moe_64"),
    size: str = "small",
    tree_samples: int = 240,
    moe_samples: int = 480,
    lr: float = 3e-4,
    kinds: tuple[str, ...] = KINDS,
    seed: int = 0,
) -> dict[str, Any]:
    """Record, train and score.

    Args:
        json_path: not used; the numbers are written by the caller.
        only: which cases.
        size: preset of the networks: ``tiny`` or ``small``.
        tree_samples: recorded steps of the Tree-LSTM.
        moe_samples: recorded steps of the MoE at each number of tokens.
        lr: learning rate of the recorded training.
        kinds: of pilots.
        seed: of their training and of the split.
    """
    result: dict[str, Any] = {"size": size}
    with progress_bar(True) as report:
        for case in chosen_cases(size, only):
            count = tree_samples if case.network == "tree" else moe_samples
            with recorded(case, count, lr, report) as traces:
                result[case.key] = _scores(case, traces, kinds, seed, report)
    _print(result, only)
    return result


def _scores(
    case: Case, traces: Path, kinds: tuple[str, ...], seed: int, report: Report
) -> dict[str, Any]:
    """Return the scores of pilots of each kind, and of the baselines, on held-out files."""
    from dynoffload.pilot.evaluate import split_by_source
    from dynoffload.pilot.fit import fit_pilot
    from dynoffload.pilot.train import HOLDOUT, encode_example, evaluate, load_programs
    from dynoffload.planning.cutting import build_vocabulary

    programs = load_programs(traces, report)
    inside, aside = split_by_source([p.source for p in programs], HOLDOUT, seed)
    vocabulary = build_vocabulary([programs[i] for i in inside])
    learned = [encode_example(vocabulary, programs[i]) for i in inside]
    held_out = [encode_example(vocabulary, programs[i]) for i in aside]
    found: dict[str, Any] = {
        "train_samples": len(inside),
        "held_out_samples": len(aside),
        "held_out_files": len({example.source for example in held_out}),
        "blocks": len(vocabulary),
    }
    baselines: dict[str, Any] = {}
    for kind in kinds:
        report(f"{case.key}: learning {kind}")
        pilot = fit_pilot(vocabulary, learned, model=kind, seed=seed, on_progress=report)
        report(f"{case.key}: scoring {kind}")
        evaluation = evaluate(pilot, held_out)
        found[kind] = {
            **_numbers(evaluation.pilot.to_json()),
            "following": _numbers(evaluation.following.to_json()),
            "latency_s": evaluation.latency_s,
            "latency_p95_s": evaluation.latency_p95_s,
            "learned": pilot.kind,
        }
        baselines["last_order"] = _numbers(evaluation.last_order.to_json())
        baselines["most_frequent"] = _numbers(evaluation.most_frequent.to_json())
    return found | baselines


def _numbers(scores: dict[str, float]) -> dict[str, Any]:
    return {name: finite(value) for name, value in scores.items()}


def _print(result: dict[str, Any], names: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="block orders predicted, files held out",
        caption="order: block-order accuracy before the first operator; bytes: weighted by the "
        "bytes of blocks that vary",
        title_justify="left",
        caption_justify="left",
    )
    for header in ("case", "predictor"):
        table.add_column(header)
    for header in ("order", "following", "bytes", "whole order", "site F1", "one prediction"):
        table.add_column(header, justify="right")
    for name in names:
        rows = {k: v for k, v in result[name].items() if isinstance(v, dict)}
        for predictor, scores in rows.items():
            following = scores.get("following")
            latency = scores.get("latency_s")
            table.add_row(
                name,
                predictor.replace("_", " "),
                _share(scores["block_order_accuracy"]),
                _share(following["block_order_accuracy"]) if following else "–",
                _share(scores["byte_weighted"]),
                _share(scores["whole_order"]),
                _share(scores["site_f1"]),
                "–" if latency is None else format_seconds(latency),
                end_section=predictor == list(rows)[-1],
            )
    Console().print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
