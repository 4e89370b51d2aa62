"""Tiles of a linear layer: their bits and time against the whole, and a weight above the budget.

For single layers: at which numbers of rows the tiled output and gradients differ from the whole's,
and the error of the input's gradient. For a small network with one large layer: the step time
whole, tiled, and tiled under a budget smaller than the weight. The three take turns, step by step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.experiments.bits import first_difference, state_of
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, option, table, turns
from dynoffload.tiling.modules import TiledLinear
from dynoffload.units import format_bytes, format_seconds, parse_bytes

ROWS = (1, 2, 3, 5, 8, 16, 31, 64, 128, 256, 512)
"""Row counts of the inputs whose bits are compared."""
SHAPES = ((512, 2048, 2), (512, 2048, 8), (500, 1501, 8), (512, 2050, 8))
"""Input and output features, and tiles; tile widths are multiples of 64 but for the last shape."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of tiles, with which the error of the input's gradient grows; 1 is the whole."""
_DTYPES = (torch.float32, torch.bfloat16)
_WAYS = ("whole", "tiled", "budget")


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    width: int = option(2048, "features into the large layer")
    features: int = option(16384, "out of it; its weight takes 4 bytes times both")
    tokens: int = option(256, "of a step")
    tile: str = option("8MiB", "the most bytes of a tile's weight")
    budget: str = option("96MiB", "of the third way: less than the weight")
    steps: int = option(7, "measured steps of each way")
    warmup: int = option(2, "steps before them")
    seed: int = option(0, "of weights and inputs")
    spill_dir: Path | None = option(None, "where the spill file lies", place=True)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: give one at least")
        weight = self.width * self.features * 4
        if parse_bytes(self.budget) >= weight:
            raise ConfigError(
                f"a budget of {self.budget} holds the weight of {format_bytes(weight)}: give "
                "less, or a wider layer"
            )


class Tiling(Experiment[Params]):
    """A case compares bits for a layer or errors for a dtype, or measures steps."""

    parameters = Params
    one_thread = True

    def cases(self) -> Mapping[str, Callable[[], Row]]:
        seed = self.params.seed
        return {
            **{
                f"bits {_name(dtype)} {shape}": partial(bits, dtype, shape, seed)
                for dtype in _DTYPES
                for shape in SHAPES
            },
            **{f"errors {_name(dtype)}": partial(errors, dtype, seed) for dtype in _DTYPES},
            "steps": partial(steps, self.params),
        }

    def run(self, case: Callable[[], Row]) -> Row:
        return case()

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        kinds = {
            kind: [row for row in result["rows"] if row["case"].startswith(kind)]
            for kind in ("bits", "errors", "steps")
        }
        (took,) = kinds["steps"]
        seconds = {way: format_seconds(found) for way, found in took["median_s"].items()}
        weight = f"a weight of {format_bytes(took['weight_bytes'])} in {took['tiles']} tiles"
        rows = [
            ["whole, in memory", seconds["whole"], "", ""],
            ["tiled, in memory", seconds["tiled"], f"{took['tiled_ratio']:.2f}× whole", ""],
            [
                f"tiled, {format_bytes(took['budget_bytes'])}",
                seconds["budget"],
                f"{took['budget_ratio']:.2f}× tiled",
                format_bytes(took["peak_fast_bytes"]),
            ],
        ]
        exact = f"NO, {took['budget_difference']}" if took["budget_difference"] else "yes"
        return [
            table("rows of inputs with differing bits", _BITS, kinds["bits"], ["tiles"]),
            Table(
                "error of dX by tiles, root mean square in eps",
                ("dtype", *map(str, COUNTS)),
                [
                    [row["dtype"], *(f"{error:.2f}" for error in row["errors"].values())]
                    for row in kinds["errors"]
                ],
            ),
            Table(weight, ("way", "a step", "ratio", "most in memory"), rows),
            f"whole, it needs a budget of {format_bytes(took['whole_least_budget_bytes'])}",
            f"under the budget, bit for bit as tiled in memory: {exact}",
            f"losses differ from the whole's by {took['loss_difference']:.1e} at most",
        ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(key: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        found: list[int] = row["rows_that_differ"][key]
        if not found:
            return "same"
        return "all" if found == list(ROWS) else ", ".join(map(str, found))

    return text


_BITS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "layer": lambda row: f"{row['dtype']} {row['in_features']}→{row['out_features']}",
    "tiles": lambda row: f"{row['tiles']} × {row['tile_features']}",
    "output": _rows("output"),
    "dW": _rows("weight.grad"),
    "dX": _rows("input.grad"),
    "dX error in eps, whole": lambda row: f"{row['input_grad_error_eps']['whole']:.2f}",
    "tiled": lambda row: f"{row['input_grad_error_eps']['tiled']:.2f}",
}


def bits(dtype: torch.dtype, shape: tuple[int, int, int], seed: int) -> Row:
    """Compare one layer with its tiled version, for all `ROWS`."""
    inside, outside, tiles = shape
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
        "dtype": _name(dtype),
        "in_features": inside,
        "out_features": outside,
        "tile_features": tiled.tiles[0].out_features,
        "tiles": len(tiled.tiles),
        "rows": list(ROWS),
        "rows_that_differ": differing,
        "input_grad_error_eps": {way: max(found) for way, found in errors.items()},
    }


def errors(dtype: torch.dtype, seed: int) -> Row:
    """Return number of tiles -> relative RMS error of the input's gradient, in eps of
    ``dtype``."""
    torch.manual_seed(seed)
    inside, outside, rows = 512, 8192, 64
    whole = nn.Linear(inside, outside, bias=False, dtype=dtype)
    grad = torch.randn(rows, outside).to(dtype)
    exact = grad.double() @ whole.weight.detach().double()
    found = {}
    for count in COUNTS:
        tiled = TiledLinear(inside, outside, bias=False, dtype=dtype, tiles=count)
        tiled.load_state_dict(whole.state_dict())
        own = _run(tiled, torch.zeros(rows, inside, dtype=dtype), grad)["input.grad"].double()
        error = (own - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        found[str(len(tiled.tiles))] = float(error) / torch.finfo(dtype).eps
    return {"dtype": _name(dtype), "errors": found}


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


def steps(params: Params) -> Row:
    """Train by three methods, which take turns."""
    width, features, tokens = params.width, params.features, params.tokens
    budget, spill_dir, warmup = params.budget, params.spill_dir, params.warmup
    torch.manual_seed(params.seed)
    whole = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, features), nn.GELU())
    tiled = copy.deepcopy(whole)
    dynoffload.tile(tiled, params.tile)
    models = dict(zip(_WAYS, (whole, tiled, copy.deepcopy(tiled)), strict=True))
    optimizers = {way: AdamW(model.parameters(), lr=1e-3) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    losses: dict[str, list[float]] = {way: [] for way in _WAYS}
    needs = _least(whole, optimizers["whole"], budget, spill_dir)
    with dynoffload.offload(
        models["budget"], optimizers["budget"], budget=budget, spill_dir=spill_dir
    ) as session:
        for way, _ in turns(_WAYS, rounds=warmup + params.steps):
            made = params.seed + len(losses[way])
            x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(made))
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
    """Return the median over steps of the ratio of two methods' times."""
    return median(one / other for one, other in zip(seconds[of], seconds[to], strict=True))


def _least(model: nn.Module, optimizer: Optimizer, budget: str, spill_dir: Path | None) -> int:
    """Return the least budget of the untiled model; raise if ``budget`` is enough for it."""
    try:
        with dynoffload.offload(model, optimizer, budget=budget, spill_dir=spill_dir):
            pass
    except BudgetError as error:
        return parse_bytes(budget) + error.lacking
    raise ConfigError(
        f"the whole model trains in a budget of {budget}: give less, or a wider layer"
    )
