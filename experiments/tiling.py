"""Tiles of a linear layer: their bits and time beside the whole, and a weight past the budget.

What it is: measurements. Of single layers, at which numbers of rows the tiled output and gradients
differ from the whole's, and how far the input's gradient is from the exact one. Of a small network
with one large layer, the time of a training step whole, tiled, and tiled under a budget that holds
less than the weight; the three take turns, step by step. What it is not: a limit, nor the time of
another network.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.experiments.bits import first_difference, state_of
from dynoffload.pilot.progress import progress_bar
from dynoffload.tiling.modules import TiledLinear
from dynoffload.units import format_bytes, format_seconds, parse_bytes

ROWS = (1, 2, 3, 5, 8, 16, 31, 64, 128, 256, 512)
"""Of the inputs whose bits are compared."""
SHAPES = ((512, 2048, 2), (512, 2048, 8), (500, 1501, 8), (512, 2050, 8))
"""Features in and out, and tiles: of multiples of 64 features, but for the last shape."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Of tiles, with which the error of the input's gradient grows; 1 is the whole."""
_WAYS = ("whole", "tiled", "budget")


def run(
    json_path: Path | None = None,
    *,
    width: int = 2048,
    features: int = 16384,
    tokens: int = 256,
    tile: str = "8MiB",
    budget: str = "96MiB",
    steps: int = 7,
    warmup: int = 2,
    seed: int = 0,
    spill_dir: Path | None = None,
) -> dict[str, Any]:
    """Measure bits, then times.

    Args:
        json_path: not used; the numbers are written by the caller.
        width: features into the large layer, whose weight takes 4 bytes times both.
        features: out of it.
        tokens: of a step.
        tile: the most bytes of a tile's weight.
        budget: of the third way; below the weight, and above what the update of a tile takes.
        steps: measured steps of each way.
        warmup: steps before them.
        seed: of weights and inputs.
        spill_dir: where the spill file lies.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: give one at least")
    if parse_bytes(budget) >= width * features * 4:
        raise ConfigError(
            f"a budget of {budget} holds the weight of {format_bytes(width * features * 4)}: give "
            "less, or a wider layer"
        )
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "bits": []}
    with progress_bar(True) as report:
        cases = [(d, *shape) for d in (torch.float32, torch.bfloat16) for shape in SHAPES]
        for done, (dtype, inside, outside, tiles) in enumerate(cases):
            report("bits", done, len(cases))
            result["bits"].append(_bits(dtype, inside, outside, tiles, seed))
        kinds = (torch.float32, torch.bfloat16)
        result["errors"] = {str(d).removeprefix("torch."): _errors(d, seed) for d in kinds}
        result |= _times(
            (width, features, tokens), tile, budget, steps, warmup, seed, spill_dir, report
        )
    _print(result)
    return result


def _bits(dtype: torch.dtype, inside: int, outside: int, tiles: int, seed: int) -> dict[str, Any]:
    """Compare one layer with its tiles, over all `ROWS`."""
    torch.manual_seed(seed)
    whole = nn.Linear(inside, outside, dtype=dtype)
    tiled = TiledLinear(inside, outside, dtype=dtype, tiles=tiles)
    tiled.load_state_dict(whole.state_dict())
    differing: dict[str, list[int]] = {"output": [], "weight.grad": [], "input.grad": []}
    errors: dict[str, list[float]] = {"whole": [], "tiled": []}
    for rows in ROWS:
        x, grad = torch.randn(rows, inside).to(dtype), torch.randn(rows, outside).to(dtype)
        found, expected = _run(tiled, x, grad), _run(whole, x, grad)
        for name, one in expected.items():
            if first_difference(found[name], one):
                differing[name].append(rows)
        exact = grad.double() @ whole.weight.detach().double()
        for way, of in (("whole", expected), ("tiled", found)):
            error = (of["input.grad"].double() - exact).abs().max() / exact.abs().max()
            errors[way].append(float(error) / torch.finfo(dtype).eps)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "in_features": inside,
        "out_features": outside,
        "tile_features": tiled.tiles[0].out_features,
        "tiles": len(tiled.tiles),
        "rows": list(ROWS),
        "rows_that_differ": differing,
        "input_grad_error_eps": {way: max(found) for way, found in errors.items()},
    }


def _errors(dtype: torch.dtype, seed: int) -> dict[str, float]:
    """Return by number of tiles the root mean square error of the input's gradient, by that of the
    gradient, in eps of ``dtype``."""
    torch.manual_seed(seed)
    inside, outside, rows = 512, 8192, 64
    whole = nn.Linear(inside, outside, bias=False, dtype=dtype)
    grad = torch.randn(rows, outside).to(dtype)
    exact = grad.double() @ whole.weight.detach().double()
    errors = {}
    for count in COUNTS:
        tiled = TiledLinear(inside, outside, bias=False, dtype=dtype, tiles=count)
        tiled.load_state_dict(whole.state_dict())
        found = _run(tiled, torch.zeros(rows, inside, dtype=dtype), grad)["input.grad"].double()
        error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        errors[str(len(tiled.tiles))] = float(error) / torch.finfo(dtype).eps
    return errors


def _run(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of one pass."""
    layer.zero_grad()
    own = x.clone().requires_grad_()
    y = layer(own)
    y.backward(grad)
    assert own.grad is not None
    tiles = layer.tiles if isinstance(layer, TiledLinear) else [layer]
    weights = [one.get_parameter("weight").grad for one in tiles]
    assert all(one is not None for one in weights)
    joined = torch.cat([one for one in weights if one is not None])
    return {"output": y.detach(), "weight.grad": joined, "input.grad": own.grad}


def _times(
    sizes: tuple[int, int, int],
    tile: str,
    budget: str,
    steps: int,
    warmup: int,
    seed: int,
    spill_dir: Path | None,
    report: Any,
) -> dict[str, Any]:
    """Train in three ways, which take turns."""
    width, features, tokens = sizes
    torch.manual_seed(seed)
    whole = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, features), nn.GELU())
    tiled = copy.deepcopy(whole)
    dynoffload.tile(tiled, tile)
    models = dict(zip(_WAYS, (whole, tiled, copy.deepcopy(tiled)), strict=True))
    optimizers = {way: AdamW(model.parameters(), lr=1e-3) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    losses: dict[str, list[float]] = {way: [] for way in _WAYS}
    needs = _least(whole, optimizers["whole"], budget, spill_dir)
    with dynoffload.offload(
        models["budget"], optimizers["budget"], budget=budget, spill_dir=spill_dir
    ) as session:
        for step in range(warmup + steps):
            x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed + step))
            for way in _WAYS:
                report(f"step: {way}", step, warmup + steps)
                start = time.perf_counter()
                loss = models[way](x).square().mean()
                loss.backward()
                optimizers[way].step()
                optimizers[way].zero_grad()
                seconds[way].append(time.perf_counter() - start)
                losses[way].append(float(loss.detach()))
    peak = int(session.stats["peak_fast_bytes"].max())
    ours, plain = (state_of(models[way], optimizers[way]) for way in ("budget", "tiled"))
    measured = {way: found[warmup:] for way, found in seconds.items()}
    layer = tiled[2]
    assert isinstance(layer, TiledLinear)
    return {
        "width": width,
        "features": features,
        "tokens": tokens,
        "weight_bytes": width * features * 4,
        "tile_bytes": layer.tiles[0].get_parameter("weight").nbytes,
        "tiles": len(layer.tiles),
        "budget_bytes": parse_bytes(budget),
        "whole_least_budget_bytes": needs,
        "peak_fast_bytes": peak,
        "seconds": measured,
        "median_s": {way: median(found) for way, found in measured.items()},
        "tiled_ratio": _ratio(measured, "tiled", "whole"),
        "budget_ratio": _ratio(measured, "budget", "tiled"),
        "budget_difference": first_difference(ours, plain)
        or ("" if losses["budget"] == losses["tiled"] else "losses"),
        "loss_difference": max(
            abs(one - other) / abs(other)
            for one, other in zip(losses["tiled"], losses["whole"], strict=True)
        ),
    }


def _ratio(seconds: dict[str, list[float]], of: str, to: str) -> float:
    """Return the median over steps of the ratio of two ways."""
    return median(one / other for one, other in zip(seconds[of], seconds[to], strict=True))


def _least(model: nn.Module, optimizer: Optimizer, budget: str, spill_dir: Path | None) -> int:
    """Return the least budget of the whole model, which ``budget`` must not be."""
    try:
        with dynoffload.offload(model, optimizer, budget=budget, spill_dir=spill_dir):
            pass
    except BudgetError as error:
        return parse_bytes(budget) + error.lacking
    raise ConfigError(
        f"the whole model trains in a budget of {budget}: give less, or a wider layer"
    )


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"tiles beside the whole layer, {result['threads']} threads",
        caption="rows: those of inputs with differing bits, of "
        + ", ".join(map(str, ROWS))
        + "; dX error: the largest by the largest element of dX, in eps of the dtype",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("layer", no_wrap=True)
    for header in ("tiles", "output", "dW", "dX", "dX error, whole", "tiled"):
        table.add_column(header, justify="right")
    for one in result["bits"]:
        table.add_row(
            f"{one['dtype']} {one['in_features']}→{one['out_features']}",
            f"{one['tiles']} × {one['tile_features']}",
            *(_rows(found) for found in one["rows_that_differ"].values()),
            *(f"{error:.2f}" for error in one["input_grad_error_eps"].values()),
        )
    console.print(table)
    for dtype, errors in result["errors"].items():
        told = ", ".join(f"{count}: {error:.2f}" for count, error in errors.items())
        console.print(f"error of dX by tiles, {dtype}, root mean square in eps: {told}")
    table = Table(
        title=f"a weight of {format_bytes(result['weight_bytes'])} in {result['tiles']} tiles, "
        f"AdamW, {result['tokens']} tokens",
        caption=f"whole, it needs a budget of {format_bytes(result['whole_least_budget_bytes'])}; "
        "time: median of a step; ratio: median over steps",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("way")
    for header in ("time", "ratio", "to", "most in memory"):
        table.add_column(header, justify="right")
    seconds = {way: format_seconds(found) for way, found in result["median_s"].items()}
    table.add_row("whole, in memory", seconds["whole"], "", "", "")
    table.add_row(
        "tiled, in memory", seconds["tiled"], f"{result['tiled_ratio']:.2f}×", "whole", ""
    )
    table.add_row(
        f"tiled, {format_bytes(result['budget_bytes'])}",
        seconds["budget"],
        f"{result['budget_ratio']:.2f}×",
        "tiled",
        format_bytes(result["peak_fast_bytes"]),
    )
    console.print(table)
    console.print(
        "under the budget, bit for bit as tiled in memory: "
        + (f"NO, {result['budget_difference']}" if result["budget_difference"] else "yes")
        + f"; losses differ from the whole's by {result['loss_difference']:.1e} at most"
    )


def _rows(found: list[int]) -> str:
    if not found:
        return "same"
    return "all" if found == list(ROWS) else ", ".join(map(str, found))
