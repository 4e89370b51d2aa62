"""Recomputation on devices other than the CPU, as far as that shows without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynoffload.config import OffloadConfig
from dynoffload.errors import ConfigError
from dynoffload.runtime.recompute.ledger import Ledger
from dynoffload.runtime.recompute.making import Making
from dynoffload.runtime.recompute.mode import Recompute, _generator_of, _place_of
from dynoffload.runtime.target import _check_options

CUDA = torch.device("cuda", 0)


def test_it_drops_where_the_model_is_and_moves_it_nowhere() -> None:
    options = OffloadConfig(policy="dtr")
    _check_options(CUDA, CUDA, options)
    for here in (torch.device("cpu"), None):
        with pytest.raises(ConfigError, match="move it there before the block"):
            _check_options(CUDA, here, options)
    with pytest.raises(ConfigError, match="is a baseline of the CPU"):
        _check_options(CUDA, CUDA, OffloadConfig(policy="os-paging"))


def test_random_numbers_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a call names, else by where its tensors are."""
    x = torch.zeros(2)
    assert _place_of({}, (x, 0.5)).type == "cpu"
    assert _place_of({}, ([x], 0.5)).type == "cpu"
    assert _place_of({"device": CUDA}, ([2],)) == CUDA
    assert _place_of({"device": None}, ([2],)).type == "cpu"
    assert _generator_of(torch.device("cpu")) is torch.default_generator
    generators = tuple(torch.Generator() for _ in range(2))
    module = SimpleNamespace(default_generators=generators, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert _generator_of(CUDA) is generators[0]
    assert _generator_of(torch.device("cuda")) is generators[1]


def test_tensors_of_other_devices_are_neither_counted_nor_dropped() -> None:
    """Those of a device that the mode is not for; here the CPU's."""
    counted = {}
    for kind in ("cpu", "cuda"):
        ledger = Ledger()
        mode = Recompute(ledger, Making(ledger, 1 << 20, debug=False, kind=kind), kind)
        mode.records = True
        with mode:
            made = torch.zeros(1024) + 1
            with torch.autograd.graph.saved_tensors_hooks(mode.pack, mode.unpack):
                product = made.requires_grad_() * made
            counted[kind] = ledger.live
            product.sum().backward()
        assert torch.equal(made.grad, 2 * made)  # type: ignore[arg-type]
    assert counted["cuda"] == 0
    assert counted["cpu"] >= 8192
