"""Tiled models under a budget that their largest weight passes: bit for bit as in plain PyTorch."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same, assert_same_training, least_budget, needs_pager
from hazards import Side, each_backend, hazard
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import dynoffload
from dynoffload.errors import BudgetError, CheckpointError, ConfigError
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.tiling import Params, Tiling

WORDS, WIDTH = 512, 256
WEIGHT = WORDS * WIDTH * 4
TILE = "32KiB"
CONFIG = {**SMALL_PAGES, "step_aside": False}
BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]


class Net(nn.Module):
    """A table and a head of 512 KiB each, and little between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embedding(tokens))))


def tokens(step: int) -> Tensor:
    return torch.randint(0, WORDS, (5,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of the next of some tokens."""
    row = tokens(step)
    return F.cross_entropy(model(row[:-1]).float(), row[1:])


def tiled(seed: int = 0, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    if tied:
        model.head.weight = model.embedding.weight
    assert dynoffload.tile(model, TILE) == ["embedding", "head"]
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@each_backend
@pytest.mark.parametrize("how", ["clipped", "autocast", "tied"])
def test_a_weight_larger_than_the_budget_trains(backend: str, how: str) -> None:
    """With AdamW and clipping over two backwards a step; SGD under autocast; and with a head that
    is tied to its table."""

    def program(side: Side) -> None:
        model = tiled(tied=how == "tied")
        make: Any = partial(SGD, momentum=0.9) if how == "autocast" else AdamW
        optimizer = make(model.parameters(), lr=1e-2)
        share = {"clipped": 0.07, "autocast": 0.1, "tied": 0.14}[how]
        with side.offload(model, optimizer, share=share):
            for step in range(6 if backend == "aside" else 2):
                for part in range(2 if how == "clipped" else 1):
                    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                        loss = loss_of(model, 2 * step + part)
                    loss.backward()
                    side.see("loss", loss)
                if how == "clipped":
                    side.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()

    side = hazard(backend, program)
    if backend != "aside":
        ((_, budget),) = side.sessions
        assert budget < WEIGHT


def test_the_error_of_a_budget_names_the_remedy_and_it_is_one() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    offload = partial(dynoffload.offload, budget=WEIGHT * 3 // 4, pilot=None, config=CONFIG)
    with pytest.raises(
        BudgetError,
        match=r"embedding\.weight.*, or split its weight by dynoffload\.tile\(model, max_bytes=",
    ):
        with offload(model, optimizer):
            pass
    dynoffload.tile(model, TILE)
    optimizer = AdamW(model.parameters())
    with offload(model, optimizer):
        train(model, optimizer, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_of_the_whole_model_gives_the_tiles_their_weights(
    backend: str, tmp_path: Path
) -> None:
    """And what is saved of the tiles is read by tiles, or by whole models as a state."""
    torch.manual_seed(0)
    whole = Net()
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    with torch.device("meta"):
        model = Net()
    dynoffload.tile(model, TILE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    reference = copy.deepcopy(whole)
    dynoffload.tile(reference, TILE)
    its = AdamW(reference.parameters(), lr=1e-2)
    budget, _ = least_budget(model, optimizer, WEIGHT * 3 // 4, CONFIG)
    assert budget < WEIGHT
    dynoffload.materialize(model, tmp_path / "whole.safetensors")
    with dynoffload.offload(
        model, optimizer, budget=budget, pilot=None, config={**CONFIG, "backend": backend}
    ) as session:
        train(model, optimizer)
        session.save(tmp_path / "saved")
        train(model, optimizer)
    train(reference, its, 2)
    fresh = tiled(seed=7)
    dynoffload.load_checkpoint(fresh, None, tmp_path / "saved")
    assert_same(dict(fresh.state_dict()), dict(reference.state_dict()), "what was saved")
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        dynoffload.load_checkpoint(whole, None, tmp_path / "saved")
    whole.load_state_dict(dynoffload.whole_state_dict(fresh))
    assert_same(dict(whole.state_dict()), dynoffload.whole_state_dict(reference), "whole")
    train(reference, its, 2)
    assert_same_training(model, optimizer, reference, its)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["head.weight"] = state["head.weight"][1:].clone()
    save_file(state, tmp_path / "other.safetensors")
    with torch.device("meta"):
        model = Net()
    dynoffload.tile(model, TILE)
    with pytest.raises(ConfigError, match=r"'head\.weight'.*\[511, 256\].*\[512, 256\]"):
        dynoffload.materialize(model, tmp_path / "other.safetensors")


@needs_pager
def test_weights_of_the_meta_device_are_drawn_as_a_whole_layer_draws_them() -> None:
    """Those of a layer without a bias, of which each tile is reset by itself."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False))
    dynoffload.tile(model, TILE)
    optimizer = SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(4)
    with dynoffload.offload(model, optimizer, budget=WEIGHT // 2, pilot=None, config=CONFIG):
        pass
    torch.manual_seed(4)
    expected = nn.Linear(WIDTH, WORDS, bias=False).weight
    assert_same(dynoffload.whole_state_dict(model)["0.weight"], expected.detach(), "weight")


def test_a_model_is_not_split_within_its_block() -> None:
    model = tiled()
    optimizer = SGD(model.parameters(), lr=1e-2)
    with dynoffload.offload(model, optimizer, budget=WEIGHT, pilot=None, config=CONFIG):
        for part in (model, model.head):
            for call in (dynoffload.tile, dynoffload.untile):
                with pytest.raises(ConfigError, match=r"was called inside the offload\(\) block"):
                    call(part)


@pytest.mark.slow
def test_the_experiment() -> None:
    params = Params(
        width=512, features=2048, tokens=32, tile="256KiB", budget="3MiB", steps=2, warmup=1
    )
    rows = carry_out(Tiling, params)["rows"]
    result = rows[-1]
    assert not result["budget_difference"]
    assert result["peak_fast_bytes"] <= result["budget_bytes"] < result["weight_bytes"]
    assert result["whole_least_budget_bytes"] > result["budget_bytes"]
    assert [len(one) for one in result["seconds"].values()] == [2, 2, 2]
    for one in rows[:8]:
        # It shows something: the input's gradient does differ, and the last shape's tiles are odd.
        assert one["rows_that_differ"]["input.grad"] == one["rows"]
    json.dumps(rows, allow_nan=False)
    with pytest.raises(ConfigError, match="holds the weight of"):
        Params(width=64, features=64, budget="1MiB")


@pytest.mark.parametrize("change", ["tiled", "made whole"])
def test_an_optimizer_from_before_the_split_is_warned_of(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has parameters that are no more, and trains nothing of the new ones."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))
    if change == "made whole":
        dynoffload.tile(model, "16KiB")
    optimizer = SGD(model.parameters(), lr=0.1)
    if change == "tiled":
        dynoffload.tile(model, "16KiB")
    else:
        dynoffload.untile(model)
    with dynoffload.offload(model, optimizer, budget="1MiB", config=SMALL_PAGES):
        pass
    assert "make the optimizer anew" in caplog.text
    caplog.clear()
    with dynoffload.offload(
        model, SGD(model.parameters(), lr=0.1), budget="1MiB", config=SMALL_PAGES
    ):
        pass
    assert caplog.text == ""


def test_a_checkpoint_of_other_tiles_names_the_remedy(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256))
    dynoffload.tile(model, "16KiB")
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"dynoffload\.tile\(\) with the same max_bytes"):
        dynoffload.load_checkpoint(nn.Sequential(nn.Linear(64, 256)), None, tmp_path / "run")


def test_what_is_no_model_or_no_list_of_paths_is_named() -> None:
    model: Any = [nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module, not a list"):
        dynoffload.tile(model)
    with pytest.raises(ConfigError, match=r"pass a list of paths, as skip=\['0'\]"):
        dynoffload.tile(nn.Sequential(*model), skip="0")
