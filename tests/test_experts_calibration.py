"""What is learned of routers that are asked early: in full, in little memory, and nothing odd."""

from __future__ import annotations

import pytest
import torch
from fused_networks import mixtral
from torch import Tensor

from dynoffload.profiler.routers import _Calibration, _mixed, _mixing, mixtures_in

pytest.importorskip("transformers")


def test_calibrations_compute_in_full_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 8, generator=generator)
    outcomes = (logits > logits.mean()).float()
    found = []
    for enabled in (False, True):
        calibration = _Calibration()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            answers = _mixed(logits, _mixing(8))
            for _ in range(3):
                calibration.chances(answers)
                calibration.learn(outcomes)
            found.append(calibration.chances(answers))
    plain, autocast = found
    assert plain is not None
    assert autocast is not None
    assert torch.equal(plain, autocast)


def _held(calibration: _Calibration) -> list[Tensor]:
    """Return the tensors that a calibration keeps."""
    kept = [*vars(calibration).values(), *calibration._waiting]
    return [one for one in kept if isinstance(one, Tensor)]


def test_a_transform_leaves_nothing_in_a_calibration() -> None:
    model = mixtral()
    layer, mixture = model.model.layers[0], mixtures_in(model)[0]
    (_, _, learn), (_, _, ask) = mixture.probes(None)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            ask(x)
            learn(x, layer.mlp.gate(layer.post_attention_layernorm(x))[2])
        return x.sum()

    calibration = mixture._calibration
    torch.func.grad(call)(torch.ones(1, 32))
    assert not _held(calibration)
    call(torch.ones(1, 32))
    assert calibration._calls == 1
    torch.func.grad(call)(torch.ones(1, 32))
    assert len(_held(calibration)) == 2
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, _held(calibration)))


def test_calibrations_take_little_where_experts_are_few() -> None:
    model = mixtral(num_local_experts=8)
    layer, mixture = model.model.layers[0], mixtures_in(model)[0]
    (_, _, learn), (_, _, ask) = mixture.probes(None)
    generator, most = torch.Generator().manual_seed(0), 0
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(3, 32, generator=generator)
            ask(x)
            learn(x, layer.mlp.gate(layer.post_attention_layernorm(x))[2])
            calibration = mixture._calibration
            most = max(most, sum(one.untyped_storage().nbytes() for one in _held(calibration)))
    assert 0 < most < 64 << 10


def test_an_overflow_does_not_end_learning() -> None:
    calibration = _Calibration()
    answers, outcomes = torch.eye(4).double(), torch.eye(4).double()
    for scale in (1.0, float("inf"), 1.0):
        calibration.chances(answers * scale)
        calibration.learn(outcomes)
    chances = calibration.chances(answers)
    assert chances is not None
    assert (chances.argmax(1) == torch.arange(4)).all()
