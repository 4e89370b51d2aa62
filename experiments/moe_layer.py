"""Experts of one layer: time and memory against transformers' and a routed-buffer reference.

The seven configurations of MoEBlaze (arXiv 2601.05296, section 6), full size on an accelerator and
scaled down on a CPU. All methods get the same tokens and routing, and alternate in every round.

[Note: memory]  *Saved* is what a forward keeps alive for its backward, without its result. *Peak*
is the maximum alive in both, without weights and tokens. On a CPU both are computed from allocator
events, operators' temporaries included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.experiments.moe_layer_ways import (
    ACTIVATIONS,
    OURS,
    ROUTED,
    Layer,
    Way,
    make_layer,
    ways_of,
)
from dynoffload.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Configuration:
    """A configuration of the paper; h = 4·d.

    Attributes:
        width: d.
        experts: E.
        k: experts per token.
        tokens: batch size times sequence length.
    """

    width: int
    experts: int
    k: int
    tokens: int


CONFIGURATIONS = {
    "conf1": Configuration(512, 4, 1, 32 * 2048),
    "conf2": Configuration(1024, 8, 2, 32 * 2048),
    "conf3": Configuration(1024, 16, 4, 32 * 2048),
    "conf4": Configuration(2048, 16, 4, 32 * 1024),
    "conf5": Configuration(512, 16, 4, 32 * 1024),
    "conf6": Configuration(1024, 16, 4, 16 * 1024),
    "conf7": Configuration(2048, 8, 4, 16 * 512),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Params:
    """Which layers, and the scale relative to the paper; 0 depends on the device."""

    configurations: tuple[str, ...] = option(tuple(CONFIGURATIONS), "of the paper")
    activations: tuple[str, ...] = option(ACTIVATIONS, "of experts")
    dtype: str = option("", "float32 or bfloat16; the latter on an accelerator by default")
    fewer_tokens: int = option(0, "divides the paper's tokens; 1 on an accelerator, else 64")
    narrower: int = option(0, "divides the paper's d and h; 1 on an accelerator, else 2")
    rounds: int = option(7, "in each of which every way runs once; five at least")
    seed: int = option(0, "of weights, tokens and choices")

    def __post_init__(self) -> None:
        check_known("configurations", self.configurations, CONFIGURATIONS)
        check_known("activations", self.activations, ACTIVATIONS)
        check_known("dtype", [self.dtype] if self.dtype else [], DTYPES)
        if self.rounds < 5:
            raise ConfigError(f"rounds={self.rounds}: medians are of five at least")


class Layers(Experiment[Params]):
    """A case is a configuration and an activation."""

    parameters = Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        here = torch.accelerator.current_accelerator(check_available=True)
        self.device = here or torch.device("cpu")
        self.dtype = params.dtype or ("float32" if here is None else "bfloat16")
        self.fewer_tokens = params.fewer_tokens or (64 if here is None else 1)
        self.narrower = params.narrower or (2 if here is None else 1)

    def cases(self) -> Mapping[str, tuple[Configuration, str]]:
        return {
            f"{name} {kind}": (
                _scaled(CONFIGURATIONS[name], self.fewer_tokens, self.narrower),
                kind,
            )
            for name in self.params.configurations
            for kind in self.params.activations
        }

    def run(self, case: tuple[Configuration, str]) -> Row:
        size, kind = case
        given = self.params
        row = _measure(size, kind, DTYPES[self.dtype], self.device, given.rounds, given.seed)
        return {"activation": kind, **row}

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "dtype": self.dtype,
            "fewer_tokens": self.fewer_tokens,
            "narrower": self.narrower,
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        ways, of = list(result["rows"][0]["ways"]), result["summary"]
        heads: dict[str, Any] = {
            "layer": lambda row: row["case"],
            **{
                name: lambda row, name=name: format_seconds(row["ways"][name]["seconds"])
                for name in ways
            },
            "best / ours": lambda row: f"{row['speed']:.2f}",
            "saved, ours": lambda row: format_bytes(row["ways"][OURS]["saved"]),
            "saved": lambda row: f"{row['saved']:.2f}",
            "peak": lambda row: f"{row['peak']:.2f}",
        }
        title = (
            f"experts of one layer on {of['device']}, {of['dtype']}: tokens of the paper "
            f"/ {of['fewer_tokens']}, d and h / {of['narrower']}"
        )
        return [
            table(title, heads, result["rows"]),
            "forward and backward, medians; best / ours: of times, by rounds, above 1 is faster; "
            f"saved and peak: ours / {ROUTED}",
        ]


def _scaled(whole: Configuration, fewer_tokens: int, narrower: int) -> Configuration:
    if whole.tokens % fewer_tokens or whole.width % narrower:
        raise ConfigError(
            f"fewer_tokens={fewer_tokens} and narrower={narrower} do not divide {whole.tokens} "
            f"tokens of {whole.width}"
        )
    return Configuration(
        whole.width // narrower, whole.experts, whole.k, whole.tokens // fewer_tokens
    )


@dataclass(frozen=True)
class _Task:
    """Inputs shared by all methods."""

    layer: Layer
    tokens: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor
    gradient: torch.Tensor

    def forward(self, way: Way) -> torch.Tensor:
        return way(self.tokens, self.chosen, self.gates)

    def backward(self, out: torch.Tensor) -> None:
        torch.autograd.backward(out, self.gradient)

    def clear(self) -> None:
        for one in (self.tokens, self.gates, *self.layer.parameters):
            one.grad = None


def _task(
    size: Configuration, kind: str, dtype: torch.dtype, device: torch.device, seed: int
) -> _Task:
    torch.manual_seed(seed)
    layer = make_layer(size.experts, size.width, kind, dtype, device)
    tokens = torch.randn(size.tokens, size.width, dtype=dtype, device=device)
    logits = torch.randn(size.tokens, size.experts, device=device)
    gates, chosen = logits.softmax(-1).topk(size.k)
    return _Task(
        layer,
        tokens.requires_grad_(),
        chosen,
        gates.to(dtype).detach().requires_grad_(),
        torch.randn_like(tokens) / size.tokens,
    )


def _measure(
    size: Configuration,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    task = _task(size, kind, dtype, device, seed)
    ways = ways_of(task.layer)
    memory = {name: _memory(task, way, device) for name, way in ways.items()}
    _compare(task, ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = _time(task, ways[name], device)
            if turn:  # the first round is warm-up
                seconds[name].append(taken)
    made: dict[str, dict[str, Any]] = {
        name: {"seconds": median(seconds[name]), "all_seconds": seconds[name], **memory[name]}
        for name in ways
    }
    others = [name for name in ways if name != OURS]
    best = min(others, key=lambda name: median(seconds[name]))
    pairs = zip(seconds[best], seconds[OURS], strict=True)
    return {
        "width": size.width, "experts": size.experts, "k": size.k, "tokens": size.tokens,
        "ways": made, "best": best,
        "speed": median(other / ours for other, ours in pairs),
        "saved": made[OURS]["saved"] / made[ROUTED]["saved"],
        "peak": made[OURS]["peak"] / made[ROUTED]["peak"],
    }  # fmt: skip


def _compare(task: _Task, ways: dict[str, Way]) -> None:
    """Check that all methods give equal results and gradients, within a tolerance.

    Raises:
        ConfigError: one differs; names it.
    """
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        out = task.forward(way)
        task.backward(out)
        found = [out.detach()]
        for one in (task.tokens, task.gates, *task.layer.parameters):
            assert one.grad is not None
            found.append(one.grad)
        task.clear()
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            error = float((ours - theirs).float().norm() / theirs.float().norm())
            if not error < _MOST_ERROR[out.dtype]:
                raise ConfigError(f"{name} differs from {next(iter(ways))} by {error:.1e}")


def _time(task: _Task, way: Way, device: torch.device) -> float:
    gc.collect()
    _wait(device)
    start = time.perf_counter()
    task.backward(task.forward(way))
    _wait(device)
    taken = time.perf_counter() - start
    task.clear()
    return taken


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _memory(task: _Task, way: Way, device: torch.device) -> dict[str, int]:
    """Return the bytes saved by forward, and the peak; see [Note: memory]."""
    task.backward(task.forward(way))  # excludes one-time allocations
    task.clear()
    gc.collect()
    count = _on_cpu if device.type == "cpu" else _on_accelerator
    saved, peak = count(lambda: task.forward(way), task.backward)
    task.clear()
    return {"saved": saved, "peak": peak}


def _on_accelerator(
    forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> tuple[int, int]:
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    out = forward()
    torch.accelerator.synchronize()
    saved = torch.accelerator.memory_allocated() - before - out.nbytes
    backward(out)
    torch.accelerator.synchronize()
    return saved, torch.accelerator.max_memory_allocated() - before


def _on_cpu(
    forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> tuple[int, int]:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = forward()
        with record_function("_turn"):
            pass
        backward(out)
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda one: one.start_ns())
    alive = peak = saved = 0
    for event in events:
        if event.name() == "_turn":
            saved = alive - out.nbytes
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return saved, peak
