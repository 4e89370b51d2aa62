"""Mixtral and T5 of transformers train to the bits of plain PyTorch under a quarter of the budget.

Tiny random configurations, but the library's own code: fused experts in three-dimensional
parameters, tied embeddings, masks, caches turned off by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import Loop, Twin, compare_runs, footprint_of, least_budget, needs_pager
from torch import Tensor, nn
from torch.optim import AdamW

transformers = pytest.importorskip("transformers")


def mixtral(intermediate_size: int = 48) -> nn.Module:
    """Return a Mixtral of four layers with four experts each."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config).train()


def t5() -> nn.Module:
    """Return a T5 with dropout whose encoder, decoder and head share one embedding."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
    )
    return transformers.T5ForConditionalGeneration(config).train()


def tokens(seed: int, rows: int = 2, length: int = 12) -> Tensor:
    """Return token numbers ``[rows, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (rows, length), generator=generator)


def mixtral_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample."""
    ids = tokens(seed, length=6 + seed % 7)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def t5_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample."""
    loss: Tensor = model(input_ids=tokens(seed, length=5 + seed % 9), labels=tokens(seed + 1)).loss
    return loss


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "mixtral": (mixtral, mixtral_loss),
    "t5": (t5, t5_loss),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": partial(AdamW, lr=1e-3, foreach=True),
    "fused": partial(AdamW, lr=1e-3, fused=True),
}


def _cases() -> list[Any]:
    """Return each network, each optimizer and each way of clipping once; all in ``make slow``."""
    brief = {("mixtral", "foreach-clipped"), ("t5", "fused")}
    cases = []
    for network, optimizer, clip in product(NETWORKS, OPTIMIZERS, (None, 0.3)):
        name = optimizer if clip is None else f"{optimizer}-clipped"
        marks = [] if (network, name) in brief else [pytest.mark.slow]
        case = pytest.param(network, optimizer, clip, marks=marks, id=f"{network}-{name}")
        cases.append(case)
    return cases


@pytest.mark.parametrize(("network", "optimizer", "clip"), _cases())
def test_twenty_steps_under_a_quarter(network: str, optimizer: str, clip: float | None) -> None:
    """Losses, parameters and optimizer state."""
    build, loss_of = NETWORKS[network]
    model = build()
    twin = Twin(model, OPTIMIZERS[optimizer])
    wanted = footprint_of(model) // 4
    budget, as_wanted = least_budget(model, twin.optimizer, wanted, {"page_bytes": 4096})
    assert as_wanted, f"a quarter, {wanted} bytes, is refused: it takes {budget}"
    session = compare_runs(
        twin,
        Loop(steps=20, clip=clip),
        range(20),
        loss_of,
        budget,
        config={"page_bytes": 4096, "min_paged_bytes": None},
    )
    assert session.stats["bytes_in"].sum() > footprint_of(model), "nothing was paged"


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mixtral_on_an_accelerator(optimizer: str, clip: float | None) -> None:
    """An emulated one. Its experts are paged by slices there too."""
    model = mixtral(intermediate_size=64)
    twin = Twin(model, OPTIMIZERS[optimizer])
    config = {"page_bytes": 4096, "min_paged_bytes": None}
    with accelerated(elsewhere=True):
        session = compare_runs(
            twin,
            Loop(steps=8, clip=clip),
            range(8),
            mixtral_loss,
            footprint_of(model) // 3,
            device=DEVICE,
            config=config,
        )
    assert any("experts" in one.region and "[" in one.region for one in session.log.transfers)


@pytest.mark.parametrize("network", NETWORKS)
def test_bfloat16_weights(network: str) -> None:
    """Whole networks in half the width, as large ones are trained."""
    build, loss_of = NETWORKS[network]
    model = build().to(torch.bfloat16)
    twin = Twin(model, OPTIMIZERS["foreach"])
    wanted = footprint_of(model) // 4
    budget, _ = least_budget(model, twin.optimizer, wanted, {"page_bytes": 4096})
    session = compare_runs(
        twin,
        Loop(steps=6, clip=1.0),
        range(6),
        loss_of,
        budget,
        config={"page_bytes": 4096, "min_paged_bytes": None},
    )
    assert session.stats["bytes_in"].sum() > 0, "nothing was paged"


@needs_pager
def test_gradient_checkpointing() -> None:
    """The recomputation in backward uses the parameters as the forward did."""
    model = t5()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    twin = Twin(model, OPTIMIZERS["fused"])
    for copy in (twin.model, twin.reference):
        copy.config.use_cache = False  # type: ignore[union-attr]
    compare_runs(
        twin,
        Loop(steps=8),
        range(8),
        t5_loss,
        footprint_of(model) // 3,
        config={"page_bytes": 4096, "min_paged_bytes": None},
    )
