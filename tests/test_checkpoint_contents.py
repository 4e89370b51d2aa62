"""What a checkpoint holds: tensors of every kind, as plain tools read them too, and other state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import SMALL_PAGES, assert_same, assert_same_training, needs_pager, small
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.errors import CheckpointError

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]


class Odd(nn.Module):
    """Every kind of tensor: each must come back under its own name, shape, dtype and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.brain = nn.Parameter(torch.randn(64, 16).to(torch.bfloat16))
        self.sixteen = nn.Parameter(torch.randn(16).to(torch.float16))
        self.wave = nn.Parameter(torch.randn(16, 32, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.randn(16, 4, dtype=torch.complex128))
        self.turned = nn.Parameter(torch.randn(48, 16).t())
        self.lasting = nn.Parameter(torch.randn(3, 4, 5, 6).contiguous(memory_format=CHANNELS))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(64, 16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(32, 32))
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.arange(16) % 3 == 0)
        self.register_buffer("passing", torch.ones(16), persistent=False)
        self.word = "as made"

    def get_extra_state(self) -> dict[str, Any]:
        """Return what is no tensor."""
        return {"word": self.word, "counts": (1, 2.5)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        assert state["counts"] == (1, 2.5)
        self.word = state["word"]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.norm(self.embedding(tokens)) * self.mask + self.passing * self.frozen[0]
        x = x + (x @ self.turned).mean(-1, keepdim=True) * self.scalar + self.sixteen.float()
        x = x + self.brain.float().mean(0) + (x.to(torch.complex64) @ self.wave).abs().mean()
        x = x + self.precise.abs().mean(1).float() + self.lasting.sum() + self.empty.sum()
        return self.head(x)


CHANNELS = torch.channels_last
TOKENS = [torch.arange(i, i + 8) for i in range(8)]


def odd(seed: int) -> tuple[Odd, Optimizer]:
    """Return an `Odd` and an optimizer with two groups."""
    torch.manual_seed(seed)
    model = Odd()
    model.word = f"seed {seed}"
    few = [model.turned, model.lasting]
    rest = [p for p in model.parameters() if all(p is not q for q in few)]
    groups = [{"params": rest}, {"params": few, "lr": 3e-3, "note": "slow"}]
    return model, torch.optim.Adam(groups, lr=1e-2, foreach=False)


def train_odd(model: nn.Module, optimizer: Optimizer, tokens: Iterable[Tensor]) -> None:
    """Make a step with each."""
    for sample in tokens:
        nn.functional.cross_entropy(model(sample), sample).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_tensor(backend: str, tmp_path: Path) -> None:
    """Saved in the middle, under a budget; gone on with under one, and plainly."""
    config = {**SMALL_PAGES, "step_aside": False, "backend": backend}
    reference, its = odd(1)
    train_odd(reference, its, TOKENS)
    model, optimizer = odd(1)
    with dynoffload.offload(model, optimizer, budget="200kB", config=config) as session:
        train_odd(model, optimizer, TOKENS[:4])
        session.save(tmp_path / "run", max_shard_size="8kB")
    assert len(list((tmp_path / "run").glob("model-*-of-*.safetensors"))) > 1

    for paged in (False, True):
        model, optimizer = odd(2)
        with torch.no_grad():
            model.passing.zero_()  # it is not saved: nobody may restore it
        if paged:
            with dynoffload.offload(model, optimizer, budget="300kB", config=config) as session:
                session.load(tmp_path / "run")
                assert not model.passing.any()
                model.passing.fill_(1)
                train_odd(model, optimizer, TOKENS[4:])
        else:
            dynoffload.load_checkpoint(model, optimizer, tmp_path / "run")
            model.passing.fill_(1)
            train_odd(model, optimizer, TOKENS[4:])
        assert_same_training(model, optimizer, reference, its)
        assert model.word == "seed 1"
        assert model.head.weight is model.embedding.weight
        assert optimizer.param_groups[1]["note"] == "slow"
        for name in ("turned", "lasting"):
            mine, other = getattr(model, name), getattr(reference, name)
            state = optimizer.state[mine]["exp_avg"]
            assert state.stride() == its.state[other]["exp_avg"].stride() == mine.stride()


def test_plain_pytorch_reads_the_model(tmp_path: Path) -> None:
    """By `load_file` and `load_state_dict`; tied weights are written once."""
    model = small()
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    other = small(5)
    other.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert_same(other.state_dict(), model.state_dict(), "model")

    tied, _ = odd(1)
    with torch.no_grad():
        tied.precise = nn.Parameter(torch.zeros(1))  # safetensors has no complex128
    dynoffload.save_checkpoint(tied, None, tmp_path / "run", max_shard_size="5GB")
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    missing, unexpected = tied.load_state_dict(tensors, strict=False)
    assert sorted(missing) == ["_extra_state", "head.weight"]
    assert not unexpected


def test_from_pretrained_reads_the_model(tmp_path: Path) -> None:
    """Sharded, with its index; `config.json` beside it outlives the next save."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "run"
    with dynoffload.offload(model, optimizer, budget="300kB", config=SMALL_PAGES) as session:
        session.save(path)
        config.save_pretrained(path)
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        session.save(path, max_shard_size="20kB")
    assert len(list(path.glob("model-*"))) > 1
    assert (path / "model.safetensors.index.json").exists()
    assert not (path / "model.safetensors").exists()
    read = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert_same(read.state_dict(), model.state_dict(), "model")


def test_a_model_on_meta_gets_its_weights_from_a_checkpoint(tmp_path: Path) -> None:
    """Without `reset_parameters`, too; a function makes the buffers that are not saved."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(64, 32))
            self.inner = Own()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x @ self.own)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("kept", torch.randn(4))
            self.register_buffer("angles", torch.empty(32), persistent=False)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.angles.copy_(torch.arange(32, device=self.angles.device).float().cos())

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.angles) * self.kept.sum()

    def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        for step in range(steps):
            x = torch.full((2, 64), float(step)).sin()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    reference = Net()
    its = torch.optim.AdamW(reference.parameters())
    train(reference, its, 2)
    dynoffload.save_checkpoint(reference, its, tmp_path / "run")
    train(reference, its, 2)
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"'own' is on the meta device.*to_empty"):
        dynoffload.load_checkpoint(model, optimizer, tmp_path / "run")
    config = {**SMALL_PAGES, "step_aside": False}
    dynoffload.materialize(model, (tmp_path / "run", Own.reset_parameters))
    with dynoffload.offload(model, optimizer, budget="100kB", config=config) as session:
        session.load(tmp_path / "run")
        train(model, optimizer, 2)
    assert_same_training(model, optimizer, reference, its)


def test_before_the_first_step_and_parameters_without_state(tmp_path: Path) -> None:
    """No state is saved as none: what a run has by then is dropped by a load."""
    reference, its = odd(1)
    train_odd(reference, its, TOKENS[:4])
    model, optimizer = odd(1)
    dynoffload.save_checkpoint(model, optimizer, tmp_path / "run")
    config = {**SMALL_PAGES, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget="200kB", config=config) as session:
        train_odd(model, optimizer, TOKENS[4:])
        assert model.turned in optimizer.state
        assert model.unused not in optimizer.state
        session.load(tmp_path / "run")
        assert not optimizer.state
        train_odd(model, optimizer, TOKENS[:4])
    assert_same_training(model, optimizer, reference, its)


def test_an_expanded_buffer_loads_once_it_is_cloned(tmp_path: Path) -> None:
    """What load_state_dict cannot fill is refused with what to do; the checkpoint is none the
    worse."""

    def model() -> nn.Module:
        made = nn.Linear(4, 4)
        made.register_buffer("scale", torch.tensor([[1.0], [2.0]]).expand(2, 3))
        return made

    dynoffload.save_checkpoint(saved := model(), None, tmp_path / "run")
    loaded = model()
    bias = loaded.bias.clone()
    with pytest.raises(
        CheckpointError,
        match=r"memory in 'scale'.*a clone in the place of each.*nothing was loaded",
    ):
        dynoffload.load_checkpoint(loaded, None, tmp_path / "run")
    assert torch.equal(loaded.bias, bias)
    loaded.scale = torch.zeros(2, 3)
    dynoffload.load_checkpoint(loaded, None, tmp_path / "run")
    assert_same(loaded.state_dict(), saved.state_dict(), "the loaded model")


def test_scaler_generator_and_objects_with_state(tmp_path: Path) -> None:
    """`extra` takes whatever has a state of numbers, texts and tensors."""

    class Counts:
        def __init__(self, *values: Any) -> None:
            self.values = values

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values, 3: {"deep": [np.float64(0.1), np.arange(3)]}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]
            assert type(state[3]["deep"][0]) is np.float64
            assert state[3]["deep"][1].tolist() == [0, 1, 2]

    model = nn.Linear(2, 2)

    def things(seed: int, scale: float, counts: Counts) -> dict[str, Any]:
        return {
            "scaler": torch.amp.GradScaler("cpu", init_scale=scale),
            "generator": torch.Generator().manual_seed(seed),
            "counts": counts,
        }

    saved = things(3, 8.0, Counts(1, float("inf"), torch.eye(2)))
    torch.rand(5, generator=saved["generator"])
    dynoffload.save_checkpoint(model, None, tmp_path / "run", extra=saved)
    loaded = things(4, 2.0, Counts())
    dynoffload.load_checkpoint(model, None, tmp_path / "run", extra=loaded)
    assert loaded["scaler"].get_scale() == 8.0
    assert_same(loaded["counts"].values, saved["counts"].values, "counts")
    drawn = [torch.rand(4, generator=one["generator"]) for one in (loaded, saved)]
    assert_same(drawn[0], drawn[1], "drawn")


def test_state_that_lies_otherwise_than_its_parameter_does_so_after_loading(
    tmp_path: Path,
) -> None:
    """A model whose memory format changes after its first step: fused kernels go by strides."""
    model = nn.Conv2d(8, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(2, 8, 9, 9)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model.to(memory_format=CHANNELS)  # type: ignore[call-overload]
    dynoffload.save_checkpoint(model, optimizer, tmp_path / "run")
    before = optimizer.state[model.weight]["exp_avg"].stride()
    assert before != model.weight.stride()
    optimizer.state.clear()
    dynoffload.load_checkpoint(model, optimizer, tmp_path / "run")
    assert optimizer.state[model.weight]["exp_avg"].stride() == before
