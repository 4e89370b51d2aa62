"""Networks with fused experts, for the tests of slices.

A tiny Mixtral of transformers in the implementations it knows, a network whose routing a test
decides, and how to see what is paged by slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.runtime.adoption.slots import Fused
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.session import Session

PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 2048}


def mixtral(implementation: str = "eager", **changes: Any) -> nn.Module:
    """Return a Mixtral of two layers with four experts, whose slices take 16 and 8 KiB."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    config = transformers.MixtralConfig(**{**sizes, **changes}, attn_implementation="eager")
    model = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation(implementation)
    return model


def mixtral_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample, of one to seven tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 64, (1, 2 + seed % 6), generator=generator)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


class Experts(nn.Module):
    """Fused experts of a user's own: runs those whose numbers it is given, each on all rows."""

    def __init__(self, count: int = 6, width: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(count, 2 * width, width, generator=generator) / 8)
        self.down = nn.Parameter(torch.randn(count, width, 2 * width, generator=generator) / 8)

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        out = torch.zeros_like(x)
        for number in hit:
            out = out + F.linear(F.gelu(F.linear(x, self.up[number])), self.down[number])
        return out


class Chosen(nn.Module):
    """A head on fused experts; a sample says which are hit."""

    def __init__(self, count: int = 6, width: int = 32) -> None:
        super().__init__()
        self.experts = Experts(count, width)
        generator = torch.Generator().manual_seed(2)
        self.head = nn.Parameter(torch.randn(width, width, generator=generator) / 8)

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        return (x + self.experts(x, hit)) @ self.head


def chosen_loss(model: nn.Module, sample: tuple[int, list[int]]) -> Tensor:
    """Return a loss for a sample: the seed of its rows, and the experts it hits."""
    seed, hit = sample
    generator = torch.Generator().manual_seed(seed)
    rows: Tensor = model(torch.randn(5, 32, generator=generator), hit)
    return (rows**2).mean()


def paging_of(session: Session) -> Paging:
    """Return what pages a session's model."""
    assert session._paging is not None
    return session._paging


def fused_of(session: Session) -> dict[str, Fused]:
    """Return the parameters that a session pages by slices, by name."""
    return {fused.name: fused for fused in paging_of(session).rows}
