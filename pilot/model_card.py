"""The model card: what a pilot was made of, how good it is and where it is not.

`model_card` returns Markdown with YAML front matter, as model hubs show it, for people; a run reads
only the pilot's own file. The same traces, seed and versions give the same card, but for its one
line of times. Source: Mitchell et al., "Model Cards for Model Reporting", 2019, arXiv 1810.03993.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from dynoffload.pilot.evaluate import COLUMNS, LEGEND, PREDICTORS, Scores
from dynoffload.pilot.pilot import RULE
from dynoffload.pilot.train import TrainResult
from dynoffload.units import format_bytes, format_seconds
from dynoffload.version import __version__

PACKAGES = ("torch", "numpy", "lightgbm", "scikit-learn", "safetensors")
"""What results may depend on besides the code itself."""
MOST_SOURCES = 50
"""Sources that a card names."""
SMALL = 200
"""Samples below which a card warns that scores are uncertain."""


def card_path(pilot: Path) -> Path:
    """Return where the card of a pilot file stands."""
    return pilot.with_name(f"{pilot.name}.card.md")


def model_card(
    result: TrainResult, *, traces: Path, command: str, seed: int, budget: int | None, nbytes: int
) -> str:
    """Return the card of a pilot.

    Args:
        result: of the training.
        traces: the directory it learned from.
        command: what makes this pilot again.
        seed: of the training.
        budget: bytes that blocks were cut for; None if there was none.
        nbytes: size of the pilot's file.
    """
    lines = [
        *_front_matter(result, seed, budget),
        "",
        f"# A pilot for network {result.pilot.vocabulary.network[:12]}",
        "",
        "It says, before a training step, in which order the network will run its blocks. It is "
        "advice about which bytes to fetch: a wrong answer costs time and changes no result.",
        "",
        "    " + command,
        "",
        *_data(result, traces),
        "",
        *_plans(result, budget),
        *_features(result),
        "",
        *_choice(result),
        "",
        *_scores(result),
        "",
        "## Limits",
        "",
        *(f"- {limit}" for limit in _limits(result)),
        "",
        "## Made by",
        "",
        f"- file: {format_bytes(nbytes)} ({nbytes} bytes)",
        *(f"- {name} {number}" for name, number in _versions().items()),
        f"- times: trained in {format_seconds(result.seconds)}; one prediction takes "
        f"{format_seconds(result.evaluation.latency_s)}, 95% at most "
        f"{format_seconds(result.evaluation.latency_p95_s)}",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(result: TrainResult, seed: int, budget: int | None) -> Iterator[str]:
    """Yield YAML; JSON's texts and numbers are YAML's."""
    scores = result.evaluation.pilot
    facts = {
        "library_name": "dynoffload",
        "tags": ["dynoffload", "block-order-prediction"],
        "network": result.pilot.vocabulary.network,
        "model": result.pilot.kind,
        "traces_sha256": result.data.digest,
        "traces": result.data.traces,
        "train_samples": result.train_samples,
        "held_out_samples": scores.samples,
        "block_order_accuracy": round(scores.block_order_accuracy, 4),
        "seed": seed,
        "budget_bytes": budget,
    }
    yield "---"
    for name, value in facts.items():
        yield f"{name}: {json.dumps(value)}"
    yield "---"


def _data(result: TrainResult, traces: Path) -> Iterator[str]:
    data = result.data
    yield "## Data"
    yield ""
    named = "of one source" if data.sources[0] else "that name no source"
    yield (
        f"{data.traces} traces of {len(data.sources)} sources in `{traces}` (SHA-256 of the set "
        f"{data.digest}): {result.train_samples} to learn from, "
        f"{result.evaluation.pilot.samples} of {len(result.evaluation.sources)} other sources to "
        "score on."
        if len(data.sources) > 1
        else f"{data.traces} traces {named} in `{traces}` (SHA-256 of the set "
        f"{data.digest}): the first {result.train_samples} to learn from, the last "
        f"{result.evaluation.pilot.samples} to score on."
    )
    yield ""
    if data.sources == ("",):
        return
    shown = ", ".join(f"`{name}`" for name in data.sources[:MOST_SOURCES])
    more = len(data.sources) - MOST_SOURCES
    yield f"Sources: {shown}" + (f" and {more} more." if more > 0 else ".")


def _plans(result: TrainResult, budget: int | None) -> Iterator[str]:
    """Yield what the steps ask of memory, where they were planned."""
    plans = result.data.plans
    if budget is None or not plans:
        return
    moved = [plan.moved_in for plan in plans if plan.moved_in is not None]
    yield "## Under the budget"
    yield ""
    yield (
        f"Blocks are cut for {format_bytes(budget)}. A step keeps "
        f"{format_bytes(int(np.median([plan.total for plan in plans])))} in the median; the least "
        f"budget that fits every step is {format_bytes(max(plan.need for plan in plans))} and the "
        "runtime's reserve. "
        + (
            "A plan that knows the whole step beforehand, with nothing resident at first, reads "
            f"{format_bytes(int(np.median(moved)))} in the median: what a prediction without an "
            "error would get."
            if moved
            else ""
        )
    )
    if len(moved) < len(plans):
        yield ""
        yield f"**{len(plans) - len(moved)} of {len(plans)} steps do not fit in this budget.**"
    yield ""


def _features(result: TrainResult) -> Iterator[str]:
    data = result.data
    yield "## Features"
    yield ""
    scaler = getattr(result.pilot.model, "scaler", None)
    looked = "" if scaler is None else f" (the model looks at {len(scaler.names)} of them)"
    names = ", ".join(f"`{name}`" for name in data.values) or "none"
    yield f"- numbers of a sample: its count of codes, and {names}{looked}"
    codes = f"{data.columns} to each element" if data.columns else "none"
    yield f"- discrete codes: {codes}"
    yield f"- hints of the network within the step: {'yes' if data.hinted else 'none'}"
    yield f"- blocks: {len(result.pilot.vocabulary)}, each by its idiom vector, bytes and place"


def _choice(result: TrainResult) -> Iterator[str]:
    card = result.pilot.card
    yield "## Model"
    yield ""
    if result.pilot.kind == RULE:
        yield "Every step runs the same blocks in the same order, so no model is needed."
        return
    yield (
        f"`{result.pilot.kind}`, by cross-validation (of whole sources, if there are enough) on "
        f"{card['validation_samples']} samples in {card['folds']} parts:"
    )
    yield ""
    yield "| kind | block-order accuracy |"
    yield "| --- | ---: |"
    for kind, accuracy in card["validation_accuracy"].items():
        yield f"| {kind} | {accuracy:.1%} |"
    for kind, gap in card["behind"].items():
        yield f"| {kind} | {100 * gap:.1f} points behind on the first part, not tried further |"


def _scores(result: TrainResult) -> Iterator[str]:
    evaluation = result.evaluation
    yield f"## Scores on {evaluation.pilot.samples} samples held out"
    yield ""
    yield f"| predictor | {' | '.join(COLUMNS)} |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for who, row in evaluation.rows().items():
        cells = (row.block_order_accuracy, row.byte_weighted, row.whole_order, row.site_f1)
        yield f"| {PREDICTORS[who]} | " + " | ".join(_share(cell) for cell in cells) + " |"
    yield ""
    yield LEGEND[0].upper() + LEGEND[1:]
    yield ""
    yield (
        f"Corrected during the step, it predicts the next block {evaluation.one_ahead:.1%} of the "
        "time."
    )


def _limits(result: TrainResult) -> Iterator[str]:
    evaluation = result.evaluation
    if not beats(evaluation.pilot, evaluation.last_order):
        yield (
            "**It is no better than repeating the last order on what was held out**: record more "
            "steps, or leave it out. A session lets it steer its first steps, and then while it "
            "does no worse."
        )
    if not beats(evaluation.pilot, evaluation.most_frequent):
        yield "**It is no better than always naming the most frequent order.**"
    if evaluation.pilot.samples < SMALL:
        yield f"Scores of {evaluation.pilot.samples} samples are uncertain."
    if len(result.data.sources) == 1:
        yield "All samples are of one source: what it does on others was not seen."
    yield "It knows this network alone: another fingerprint is refused."
    yield (
        "It knows the weights that were traced: where routing drifts as training goes on, its "
        "accuracy falls, and a session corrects it by what ran."
    )


def beats(one: Scores, other: Scores) -> bool:
    """Return whether the one predicts orders better than the other."""
    return one.block_order_accuracy > other.block_order_accuracy


def _versions() -> dict[str, str]:
    found = {"dynoffload": __version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _share(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}"
