"""The optimizer on the host: what a delayed update does to the loss.

Trains a small language model in half precision on the same texts with a `HostOptimizer`, with and
without delay. There is no link here, and forward, backward and update share the cores, so times do
not show what the delay gains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median
from typing import Any

from torch.optim import AdamW

from dynoffload.errors import ConfigError
from dynoffload.experiments import zoo
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.units import format_seconds

UPDATES = ("normal", "delayed", "delayed after a warm-up")
_LAST = 10  # final steps over which the loss is averaged


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    preset: str = option("tiny", "sizes of the language model, which is in bfloat16")
    steps: int = option(200, "of each training")
    warmup: int = option(40, "steps that are not delayed, where some are not")
    seeds: int = option(2, "of texts and weights, each of which is trained with")
    length: int = option(128, "tokens of a sample")
    lr: float = option(1e-3, "of AdamW")

    def __post_init__(self) -> None:
        if self.steps <= max(self.warmup, _LAST) or self.seeds < 1:
            raise ConfigError(
                f"steps={self.steps} must be more than warmup={self.warmup} and {_LAST}, and "
                f"seeds={self.seeds} at least 1"
            )


class DelayedUpdates(Experiment[Params]):
    """A case is a kind of update and a seed."""

    parameters = Params

    def cases(self) -> Mapping[str, tuple[str, int]]:
        return {
            f"{updates}, seed {seed}": (updates, seed)
            for updates in UPDATES
            for seed in range(self.params.seeds)
        }

    def run(self, case: tuple[str, int]) -> Row:
        params, (updates, seed) = self.params, case
        delay: dict[str, Any] = {"delayed": updates != "normal"}
        if updates == UPDATES[-1]:
            delay["warmup_steps"] = params.warmup
        model = zoo.build("moe", params.preset, seed=seed).bfloat16()
        texts = zoo.samples("moe", seed=seed, length=params.length)
        losses, seconds = [], []
        with HostOptimizer(model.parameters(), AdamW, lr=params.lr, **delay) as optimizer:
            for sample in islice(texts, params.steps):
                start = time.perf_counter()
                loss = model(*sample.args).loss
                loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - start)
                losses.append(float(loss.detach()))
        return {
            "updates": updates,
            "seed": seed,
            "loss": mean(losses[-_LAST:]),
            "seconds": median(seconds),
            "losses": losses,
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        found = {}
        for updates in UPDATES:
            mine = [row for row in rows if row["updates"] == updates]
            loss, seconds = mean(r["loss"] for r in mine), median(r["seconds"] for r in mine)
            found[updates] = {"loss": loss, "seconds": seconds}
        return found

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        seeds = range(result["params"]["seeds"])
        losses = {(row["updates"], row["seed"]): row["loss"] for row in result["rows"]}
        heads = ("updates", *(f"seed {seed}" for seed in seeds), "mean", "a step")
        rows = [
            [
                updates,
                *(f"{losses[updates, seed]:.4f}" for seed in seeds),
                f"{found['loss']:.4f}",
                format_seconds(found["seconds"]),
            ]
            for updates, found in result["summary"].items()
        ]
        return [Table(f"mean loss of the last {_LAST} steps, on the same texts", heads, rows)]
