"""Experts of one layer: time and memory beside transformers' and a reference with routed buffers.

What it is: the seven configurations of MoEBlaze (arXiv 2601.05296, section 6), whole on an
accelerator and scaled down on a CPU; forward and backward of each way on the same tokens and
choices, one after the other in every round. What it is not: the ways (`moe_layer_ways`), the
router, or a session.

[Note: memory]  *Saved* is what a forward leaves alive for its backward, without its result: what a
layer costs for as long as others run. *Peak* is the most that is alive in forward and backward
beside weights and tokens, gradients of weights included. On a CPU both are counted from what the
allocator gives and takes, operators' temporaries included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments.moe_layer_ways import (
    ACTIVATIONS,
    OURS,
    ROUTED,
    Layer,
    Way,
    make_layer,
    ways_of,
)
from dynoffload.pilot.progress import progress_bar
from dynoffload.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Configuration:
    """One of the paper's; h = 4·d.

    Attributes:
        width: d.
        experts: E.
        k: experts of a token.
        tokens: batch by sequence.
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


def run(
    json_path: Path | None = None,
    *,
    configurations: str = ",".join(CONFIGURATIONS),
    activations: str = ",".join(ACTIVATIONS),
    dtype: str = "",
    fewer_tokens: int = 0,
    narrower: int = 0,
    rounds: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure.

    Args:
        json_path: not used; the numbers are written by the caller.
        configurations: of the paper, with commas between.
        activations: likewise.
        dtype: float32 or bfloat16; by default bfloat16 on an accelerator and float32 on a CPU.
        fewer_tokens: the paper's tokens are divided by it; 0: by 1 on an accelerator, else by 64.
        narrower: likewise d and h; 0: by 1 on an accelerator, else by 2.
        rounds: in each of which every way runs once; five at least.
        seed: of weights, tokens and choices.

    Returns:
        Seconds and bytes of each way, by configuration and activation.

    Raises:
        ConfigError: an option is wrong, or a way has another result than the others.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    device = here or torch.device("cpu")
    dtype = dtype or ("float32" if here is None else "bfloat16")
    fewer_tokens = fewer_tokens or (64 if here is None else 1)
    narrower = narrower or (2 if here is None else 1)
    names, kinds = configurations.split(","), activations.split(",")
    for what, given, known in (
        ("configurations", names, list(CONFIGURATIONS)),
        ("activations", kinds, list(ACTIVATIONS)),
        ("dtype", [dtype], list(DTYPES)),
    ):
        if unknown := [one for one in given if one not in known]:
            raise ConfigError(f"{what}={unknown[0]!r} is unknown; there are {', '.join(known)}")
    if rounds < 5:
        raise ConfigError(f"rounds={rounds}: medians are of five at least")
    result: dict[str, Any] = {
        "device": str(device), "dtype": dtype, "fewer_tokens": fewer_tokens, "narrower": narrower,
        "threads": torch.get_num_threads(), "rounds": rounds, "seed": seed, "layers": [],
    }  # fmt: skip
    with progress_bar(True) as report:
        cases = [(name, kind) for name in names for kind in kinds]
        for at, (name, kind) in enumerate(cases):
            report(f"{name}, {kind}", at, len(cases))
            scaled = _scaled(CONFIGURATIONS[name], fewer_tokens, narrower)
            row = _measure(scaled, kind, DTYPES[dtype], device, rounds, seed)
            result["layers"].append({"configuration": name, "activation": kind, **row})
    _print(result)
    return result


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
    """What each way is given."""

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
            if turn:  # the first warms up
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
    """Check that all ways compute the same, results and gradients.

    Raises:
        ConfigError: naming the one that does not.
    """
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        if name == "MegaBlocks":  # it has weights of its own
            continue
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
    """Return bytes saved by forward, and the most alive; see [Note: memory]."""
    task.backward(task.forward(way))  # what is made once and kept
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


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=(
            f"experts of one layer on {result['device']}, {result['dtype']}: tokens of the paper "
            f"/ {result['fewer_tokens']}, d and h / {result['narrower']}"
        ),
        caption=(
            f"forward and backward, medians of {result['rounds']}; ours / best: of times, by "
            f"rounds, above 1 is faster; saved and peak: ours / {ROUTED}"
        ),
        title_justify="left",
        caption_justify="left",
    )
    ways = list(result["layers"][0]["ways"])
    for header in ("layer", *ways, "best / ours", "saved, ours", "saved", "peak"):
        table.add_column(header, justify="right")
    for row in result["layers"]:
        made = row["ways"]
        table.add_row(
            f"{row['configuration']} {row['activation']}",
            *(format_seconds(made[name]["seconds"]) for name in ways),
            f"{row['speed']:.2f}",
            format_bytes(made[OURS]["saved"]),
            f"{row['saved']:.2f}",
            f"{row['peak']:.2f}",
        )
    Console().print(table)
