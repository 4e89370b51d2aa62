"""Frozen weights of transformers models are paged from the files of `save_pretrained`."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same, least_budget, needs_pager
from fused_networks import paging_of
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError, SpillError
from dynoffload.memory.device import Device
from dynoffload.memory.pager import Pager
from dynoffload.runtime.session import Session

pytest.importorskip("transformers")

from test_materialize_saved import SAVED, built, saved

from dynoffload.integrations.constructing import PlainWeights
from dynoffload.integrations.transformers import materialize

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}
IDS = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(3))


def frozen_but_the_norms(model: Any) -> Any:
    """Freeze all but what is small, and return the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model.train()


def trains(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("name", SAVED)
def test_frozen_weights_stay_in_their_files(
    name: str, shard: str, backend: str, tmp_path: Path
) -> None:
    """Their bits are those of `from_pretrained`, also after the block."""
    stock, config = saved(name, tmp_path, torch.bfloat16, shard)
    loaded = frozen_but_the_norms(stock.from_pretrained(tmp_path, dtype=torch.bfloat16))
    expected = trains(loaded, AdamW(loaded.parameters(), lr=1e-2))
    model = frozen_but_the_norms(built(stock, config, torch.bfloat16))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    options = {**CONFIG, "backend": backend}
    nbytes = sum(p.nbytes for p in model.parameters())
    budget, _ = least_budget(model, optimizer, nbytes // 2, options)
    materialize(model, tmp_path)
    with dynoffload.offload(model, optimizer, budget=budget, config=options) as session:
        assert trains(model, optimizer) == expected
        slots = paged(session, model)
        device = paging_of(session).device
        assert len(slots) > 10
        if isinstance(device, Pager):
            assert all(map(device.is_sourced, slots))
    assert_same(dict(model.named_parameters()), dict(loaded.named_parameters()), "after")


def paged(session: Session, model: Any) -> list[int]:
    """Return the regions of frozen parameters."""
    store = paging_of(session).store
    frozen = (p for p in model.parameters() if not p.requires_grad)
    return [slot.region for parameter in frozen for slot in store.slots_of(parameter)]


@needs_pager
@pytest.mark.parametrize(("copied", "warned"), [(0, False), (2, False), (3, True), (24, True)])
def test_weights_of_another_type_than_the_files_are_copied_with_a_warning(
    copied: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two projections are 11% of the bytes, three 16%: it comes above an eighth."""
    stock, config = saved("qwen3-moe", tmp_path, torch.bfloat16)
    model = built(stock, config, torch.bfloat16).requires_grad_(False).eval()
    named = dict(model.named_parameters())
    for name in sorted(named, key=lambda name: "_proj.weight" not in name)[:copied]:
        named[name].data = named[name].data.float()
    materialize(model, tmp_path)
    with torch.no_grad(), dynoffload.offload(model, budget="1MB", config=CONFIG):
        if copied in (0, len(named)):  # of one dtype
            model(input_ids=IDS)
    assert ("are copied to the spill file" in caplog.text) is warned


@needs_pager
def test_they_take_no_room_in_the_spill_file(tmp_path: Path) -> None:
    stock, config = saved("qwen3-moe", tmp_path, num_hidden_layers=6)
    model = built(stock, config).requires_grad_(False).eval()
    loaded = stock.from_pretrained(tmp_path).eval()
    nbytes = sum(p.nbytes for p in model.parameters())
    materialize(model, tmp_path)
    with torch.no_grad(), dynoffload.offload(model, budget=nbytes // 3, config=CONFIG) as session:
        for _ in range(2):
            assert torch.equal(model(input_ids=IDS).logits, loaded(input_ids=IDS).logits)
        device: Any = paging_of(session).device
        counters = device.counters()
        assert counters.bytes_in > nbytes
        assert counters.bytes_out == 0
        assert os.fstat(device._spill.fd).st_blocks == 0
        for one in (model, loaded):
            one.model.layers[1].mlp.experts.down_proj[2].mul_(2.0)
        for _ in range(2):
            assert torch.equal(model(input_ids=IDS).logits, loaded(input_ids=IDS).logits)
        assert 0 < device.counters().bytes_out < nbytes // 8
        assert 0 < session.spill_bytes < nbytes // 8


@pytest.mark.parametrize("changes", ["nothing", "the files", "a shape", "a copy"])
def test_files_are_converted_once_unless_something_changes(changes: str, tmp_path: Path) -> None:
    class Counted(PlainWeights):
        asked = 0

        def values(self, *args: Any) -> Any:
            Counted.asked += 1
            return super().values(*args)

    stock, config = saved("mixtral", tmp_path)
    model = built(stock, config).requires_grad_(False).eval()
    dynoffload.materialize(model, (tmp_path, Counted()))
    if changes == "the files":
        torch.manual_seed(5)
        stock(config).save_pretrained(tmp_path)
    elif changes == "a shape":
        model.model.norm.weight.data = torch.empty(3, device="meta")
        with (
            pytest.raises(ConfigError, match=r"'model.norm.weight' .*the model's has \[3\]"),
            dynoffload.offload(model, budget="64MB", config=CONFIG),
        ):
            pass
        model.model.norm.weight.data = torch.empty(32, device="meta")
    elif changes == "a copy":
        model = copy.deepcopy(model)
    loaded = stock.from_pretrained(tmp_path)
    with dynoffload.offload(model, budget="64MB", config=CONFIG):
        assert_same(dict(model.named_parameters()), dict(loaded.named_parameters()), changes)
    assert Counted.asked == (1 if changes == "nothing" else 2)


@needs_pager
def test_a_file_that_changes_under_a_block_is_an_error(tmp_path: Path) -> None:
    stock, config = saved("mixtral", tmp_path)
    model = built(stock, config).requires_grad_(False).eval()
    materialize(model, tmp_path)
    budget = sum(p.nbytes for p in model.parameters()) // 2
    with torch.no_grad(), dynoffload.offload(model, budget=budget, config=CONFIG) as session:
        model(input_ids=IDS)
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        device, regions = paging_of(session).device, paged(session, model)
        with pytest.raises(SpillError, match=r"model.safetensors, where .*has changed"):
            fetch(device, regions)
        for region in regions:  # a block that ends reads them all
            device.discard(region)


def fetch(device: Device, regions: list[int]) -> None:
    for region in regions:
        device.acquire([region])
