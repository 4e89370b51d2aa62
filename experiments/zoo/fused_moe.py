"""The MoE language model's sizes as a Mixtral of transformers, whose experts are fused.

What it is: `build`, a wrapper that takes samples and gives a loss as the zoo's networks do, around
transformers' own code with its eager loop over experts. What it is not: the same network as the
zoo's, whose routing and balancing loss are its own; it has the same parameters to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.sources import Split
from dynoffload.experiments.zoo.building import ZooSample, built
from dynoffload.experiments.zoo.moe_lm import PRESETS, MoEConfig, MoEOutput, text_samples

_DEVIATION = 0.02  # of initial weights


class FusedMoELM(nn.Module):
    """A Mixtral that takes tokens and targets."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

        self.config = config
        sizes = MixtralConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            num_local_experts=config.experts,
            num_experts_per_tok=config.top_k,
            tie_word_embeddings=config.tied,
            use_cache=False,
        )
        self.inner: Any = MixtralForCausalLM(sizes).train()
        self.inner.set_experts_implementation("eager")
        with torch.device("cpu"):  # its buffers follow from the sizes, and are small
            self.inner.model.rotary_emb = MixtralRotaryEmbedding(self.inner.config)
        for module in self.modules():
            module.reset_parameters = _Reset(module)  # type: ignore[assignment]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> MoEOutput:
        """Predict each token's successor.

        Args:
            tokens: int64 ``[rows, length]``.
            targets: int64 ``[rows, length]``; without them there is no loss.
        """
        logits: Tensor = self.inner(input_ids=tokens).logits
        if targets is None:
            return MoEOutput(None, logits)
        return MoEOutput(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


class _Reset:
    """Gives one module its initial weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter in self._module._parameters.values():
            if parameter is not None and parameter.dim() == 1:
                parameter.fill_(1.0)  # a norm's
            elif parameter is not None:
                parameter.normal_(std=_DEVIATION)


def build(
    preset: str = "tiny", *, device: str | torch.device = "cpu", **overrides: float
) -> FusedMoELM:
    """Return a network of the sizes in `moe_lm.PRESETS`; see `built`."""
    model = built(FusedMoELM, PRESETS, preset, device, overrides)
    if torch.device(device).type != "meta":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model.config.seed)
            for module in model.modules():
                module.reset_parameters()  # type: ignore[operator]
    return model


def samples(split: Split | str = "train", *, seed: int = 0, **shape: int) -> Iterator[ZooSample]:
    """Yield texts; see `dynoffload.datasets.text.batches` for ``shape``."""
    return text_samples(split, seed=seed, **shape)
