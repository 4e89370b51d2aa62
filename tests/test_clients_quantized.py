"""Adapters on a quantized base: to the bits of PEFT without a budget, or refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ATTENTION, drawn, sample_loss, trained_part
from clients import assert_paged
from emulated import DEVICE, accelerated
from exactness import SMALL_PAGES, assert_ordinary, assert_same, is_paged
from hazards import Side, each_backend, each_of_the_cpu, each_paged, hazard, stepwise, trained
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from test_materialize_saved import saved
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from trainers import EVERYTHING, assert_same_outcome, trainer
from transformers import AutoModelForCausalLM

import dynoffload
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.integrations.transformers import OffloadCallback
from dynoffload.memory.local import wrapped

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def of_torchao(bits: int) -> Any:
    """Return transformers' configuration of torchao's weights, of which int4 are in bytes."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    if bits == 8:
        return TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
    return TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4))


def of_bitsandbytes(**options: Any) -> Any:
    """Return transformers' configuration of bitsandbytes' weights."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def nf4(**options: Any) -> Any:
    return of_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)


PAGED: dict[str, Callable[[], Any]] = {
    "nf4": nf4,
    "nf4, twice quantized": lambda: nf4(bnb_4bit_use_double_quant=True),
    "nf4 in bfloat16": lambda: nf4(bnb_4bit_compute_dtype=torch.bfloat16),
    "torchao's int8": lambda: of_torchao(8),
    "torchao's int4": lambda: of_torchao(4),
}


def based(path: Path, quantized: Any) -> Any:
    """Return a Llama of random weights, quantized as it is read."""
    saved("llama", path, hidden_size=128, intermediate_size=256)
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantized, device_map="cpu", dtype=torch.float32
    )


def adapted(path: Path, quantized: Any) -> Any:
    """Return it under LoRA."""
    model = based(path, quantized)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        targets = [*ATTENTION, "down_proj"]
        config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.1)
        return drawn(get_peft_model(model, config)).train()


@each_paged
@pytest.mark.parametrize("kind", PAGED)
def test_quantized_bases_train_to_the_same_bits(backend: str, kind: str, tmp_path: Path) -> None:
    """With evaluations between, for which bitsandbytes may pack weights anew, and a merge."""
    quantized, chosen = PAGED[kind](), random.Random(kind)

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        side.step(sample_loss(model, step), optimizer)
        if step in (1, 3):
            with torch.no_grad():
                side.see("score", sample_loss(model.eval(), 9))
            model.train()
        if step == 2 and "int4" not in kind:  # PEFT does not merge into these
            model.merge_adapter()
            side.see("merged", sample_loss(model, 9))
            model.unmerge_adapter()

    make = lambda: adapted(tmp_path, quantized)  # noqa: E731
    for _ in range(3):
        share = chosen.uniform(0.45, 0.8) if "torchao" in kind else chosen.uniform(0, 0.6)
        program = trained(make, each, optimizer=trained_part, share=share, steps=5)
        side = hazard(backend, program, budgeted=False)
        (session, _), *_ = side.sessions
        kinds = {type(p).__name__ for p in session.model.parameters()}
        assert len(kinds) == 2
        assert "Parameter" in kinds


@each_paged
@pytest.mark.parametrize("kind", ["nf4 in bfloat16", "torchao's int8"])
def test_a_trainer_trains_on_a_quantized_base(backend: str, kind: str, tmp_path: Path) -> None:
    """As recipes have it: the rest in single precision, autocast, and layers computed again."""
    options = {**EVERYTHING, "gradient_checkpointing": True, "bf16": True}
    quantized, sides = PAGED[kind](), []
    for ours in (False, True):
        model = prepare_model_for_kbit_training(based(tmp_path / "base", quantized))
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION)).train()
        budget = sum(part.nbytes for p in model.parameters() for part in wrapped(p)) * 3 // 4
        config = {**SMALL_PAGES, "step_aside": False, "backend": backend}
        calls = [OffloadCallback(budget=budget, config=config)] if ours else []
        sides.append(trainer(model, tmp_path / str(ours), *calls, **options))
        sides[-1].train()
    assert_paged(calls[0].session, steps=4)
    assert_same_outcome(sides[1], sides[0])


@each_paged
def test_int8_of_bitsandbytes_stays_in_memory(backend: str, tmp_path: Path) -> None:
    """Its layers keep a second tensor on the same memory."""
    quantized = of_bitsandbytes(load_in_8bit=True)
    make = lambda: adapted(tmp_path, quantized)  # noqa: E731
    program = trained(make, loss=sample_loss, optimizer=trained_part, share=0.9)
    hazard(backend, program, budgeted=False)


@each_paged
def test_int8_of_bitsandbytes_without_room_is_refused(backend: str, tmp_path: Path) -> None:
    model = adapted(tmp_path, of_bitsandbytes(load_in_8bit=True))
    budget = sum(p.nbytes for p in model.parameters()) // 2
    words = r"something else holds it too: .* 'base_model.*q_proj.*weight' \(Int8Params\)"
    block = dynoffload.offload(model, budget=budget, config={"backend": backend})
    with pytest.raises(BudgetError, match=words), block:
        pass
    assert_ordinary(model)


# Without these libraries


class Scaled(nn.Parameter):
    """Bytes that stand for numbers by a scale, which is an attribute, as in bitsandbytes."""

    scale: float

    @staticmethod
    def of(weight: Tensor) -> Scaled:
        """Quantize ``weight``."""
        scale = float(weight.abs().max()) / 127
        data = (weight / scale).round().to(torch.int8)
        made: Scaled = torch.Tensor._make_subclass(Scaled, data, False)
        made.scale = scale
        return made


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled.of(torch.randn(64, 64) / 8)
        self.up = nn.Linear(64, 4, bias=False)
        self.down = nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, Scaled)
        return F.linear(x, weight.to(x.dtype) * weight.scale) + self.down(self.up(x))


def layers() -> nn.Module:
    """Return a network on which everything but low ranks is frozen bytes."""
    return nn.Sequential(*(Quantized() for _ in range(6)), nn.Linear(64, 10))


@stepwise(each_backend, layers, optimizer=trained_part, share=0.6)
def test_parameters_of_a_class_with_attributes(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
    side.step(model(x).square().mean(), optimizer)


class Split(nn.Module):
    """Multiplies by the sum of a wrapper's tensors."""

    def __init__(self) -> None:
        super().__init__()
        high = torch.randn(64, 64) / 8
        self.weight = nn.Parameter(TwoTensor(high, high / 256), requires_grad=False)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return torch.tanh(self.out(F.linear(x, weight.a + weight.b)))


@stepwise(each_of_the_cpu, lambda: nn.Sequential(*(Split() for _ in range(6))), share=0.5, steps=6)
def test_frozen_wrappers(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Also where one is written, and one gets other tensors, in mid-run."""
    if step == 2:
        with torch.no_grad():
            model[1].weight.a.mul_(0.5)
    if step == 3:
        model[2].weight = nn.Parameter(model[3].weight.detach().clone(), requires_grad=False)
    if step == 4:
        side.see("a copy", copy.deepcopy(model[1]).weight.detach())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
    side.step(model(x).square().mean(), optimizer)
    for session, _ in side.sessions if side.paging else ():
        assert is_paged(session, model[0].weight.a)
        assert not is_paged(session, model[0].weight.b)


STRANGE: dict[str, Callable[[], Tensor]] = {
    "two tensors, trained": lambda: TwoTensor(torch.ones(64, 64), torch.ones(64, 64)),
    "two tensors on the meta device": lambda: TwoTensor(
        *[torch.ones(9, device="meta") for _ in "ab"]
    ),
    "quantized by torch": lambda: torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor([*torch.ones(64, 64)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([*torch.ones(64, 64)]),
    "of oneDNN": lambda: torch.ones(64, 64).to_mkldnn(),
}


@each_paged
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_what_has_no_plain_memory_is_refused(backend: str, kind: str, when: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = [p.detach().clone() for p in model.parameters()]
    odd = nn.Parameter(STRANGE[kind](), requires_grad="trained" in kind)
    if when == "before":
        model[1].odd = odd
    options = {"backend": backend, "step_aside": False, "page_bytes": 4096}
    block = dynoffload.offload(model, optimizer, budget="300kB", config=options)
    words = "'1.odd' of this Sequential is a .*, (which wraps other|whose class stores its values)"

    def put_in() -> None:
        model[1].odd = odd
        model(torch.randn(4, 64))

    with pytest.raises(ConfigError, match=words), block:
        put_in()
    assert model[1].odd is odd
    del model[1].odd
    assert_same([p.detach() for p in model.parameters()], weights, "weights")


def test_wrappers_on_an_accelerator_are_refused() -> None:
    """As the block begins, and where one is added later."""
    words = r"0.weight' of this Sequential is a TwoTensor, .*: train it in memory of the CPU"
    x = torch.randn(4, 64)

    def added(model: Any) -> None:
        model(x)
        model.append(nn.Sequential(Split()))
        model(x)

    with accelerated():
        for model in (nn.Sequential(nn.Linear(64, 64)), nn.Sequential(Split())):
            config = {**SMALL_PAGES, "step_aside": False}
            block = dynoffload.offload(model, budget="300kB", device=DEVICE, config=config)
            with pytest.raises(ConfigError, match=words), block:
                added(model)
