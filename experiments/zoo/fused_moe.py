"""transformers' Mixtral in the MoE language model's sizes; its experts are fused.

It runs transformers' code with its eager loop over experts. Its parameters have the same sizes as
those of the zoo's own network; routing and balancing loss are transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo import moe_lm
from dynoffload.experiments.zoo.building import Output, texts

PRESETS, samples = moe_lm.PRESETS, texts
_DEVIATION = 0.02  # of initial weights


class FusedMoELM(nn.Module):
    """A Mixtral that takes tokens and targets; its sizes are those of `moe_lm.MoELM`."""

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        experts: int,
        width: int,
        top_k: int = 2,
        vocabulary: int = 256,
        tied: bool = False,
    ) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

        sizes = MixtralConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        device, drawn = torch.get_default_device(), torch.get_rng_state()
        with torch.device("meta"):  # weights are initialized below, module by module
            self.inner: Any = MixtralForCausalLM(sizes).train()
        self.inner.set_experts_implementation("eager")
        if device.type != "meta":
            self.inner.to_empty(device=device)
            self.inner.tie_weights()
        with torch.device("cpu"):  # buffers are determined by the sizes, and small
            self.inner.model.rotary_emb = MixtralRotaryEmbedding(self.inner.config)
        torch.set_rng_state(drawn)
        for module in self.modules():
            reset = _Reset(module)
            module.reset_parameters = reset  # type: ignore[assignment]
            if device.type != "meta":
                reset()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        """Predict each token's successor.

        Args:
            tokens: int64 ``[rows, length]``.
            targets: int64 ``[rows, length]``; without them there is no loss.
        """
        logits: Tensor = self.inner(input_ids=tokens).logits
        if targets is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


class _Reset:
    """Initializes the weights of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter in self._module._parameters.values():
            if parameter is not None and parameter.dim() == 1:
                parameter.fill_(1.0)  # of a norm
            elif parameter is not None:
                parameter.normal_(std=_DEVIATION)
