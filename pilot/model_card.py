"""The model card: what a pilot was made of, how good it is and where it is not.

`model_card` returns Markdown for people; a run reads only the pilot's own file. The same traces,
seed and versions give the same card, but for its one line of times.
Source: Mitchell et al., "Model Cards for Model Reporting", 2019, arXiv 1810.03993.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dynoffload.pilot.evaluate import COLUMNS, LEGEND, PREDICTORS, Scores
from dynoffload.pilot.pilot import RULE
from dynoffload.pilot.train import TrainResult
from dynoffload.units import format_bytes, format_seconds
from dynoffload.version import __version__

PACKAGES = ("torch", "numpy", "lightgbm", "safetensors")
"""What results may depend on besides the code itself."""
SMALL = 200
"""Samples below which a card warns that scores are uncertain."""


def card_path(pilot: Path) -> Path:
    """Return where the card of a pilot file stands."""
    return pilot.with_name(f"{pilot.name}.card.md")


def model_card(result: TrainResult, *, command: str, nbytes: int) -> str:
    """Return the card of a pilot.

    Args:
        result: of the training.
        command: what makes this pilot again.
        nbytes: size of the pilot's file.
    """
    held_out = "samples of other sources" if len(result.sources) > 1 else "last samples"
    lines = [
        f"# A pilot for network {result.pilot.vocabulary.network[:12]}",
        "",
        "It says, before a training step, in which order the network will run its blocks. It is "
        "advice about which bytes to fetch: a wrong answer costs time and changes no result.",
        "",
        "    " + command,
        "",
        f"- {result.traces} traces of {len(result.sources)} sources, SHA-256 of the set "
        f"{result.digest}",
        f"- {result.train_samples} samples to learn from, {result.evaluation.pilot.samples} "
        f"{held_out} to score on",
        f"- {len(result.pilot.vocabulary)} blocks",
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
    if len(result.sources) == 1:
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
