"""transformers' mixtures of experts, whose experts are fused; by default Mixtral.

They run transformers' code with its eager loop over experts. A Mixtral has parameters of the same
sizes as those of the MoE language model; routing is transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo import moe_lm
from dynoffload.experiments.zoo.building import Output, texts
from dynoffload.profiler.input_features import InputFeatures

_TINY = {"hidden": 64, "layers": 4, "heads": 4, "experts": 64, "width": 96, "top_k": 4}
_SMALL = {**_TINY, "hidden": 256, "width": 384}
_ONE_DENSE: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "num_local_experts", "intermediate_size", {}),
    "qwen3-moe": ("Qwen3Moe", "num_experts", "moe_intermediate_size", {"head_dim": 16}),
    "olmoe": ("Olmoe", "num_experts", "intermediate_size", {}),
    "deepseek-v3": ("DeepseekV3", "n_routed_experts", "moe_intermediate_size", _ONE_DENSE),
}
"""Family -> its name in transformers, its names of the experts' number and width, other sizes."""
PRESETS: dict[str, dict[str, Any]] = {
    **moe_lm.PRESETS,
    **{f"{family}-tiny": {**_TINY, "family": family} for family in FAMILIES},
    **{f"{family}-small": {**_SMALL, "family": family} for family in FAMILIES},
}
samples = texts
_DEVIATION = 0.02  # of initial weights


class FusedMoELM(nn.Module):
    """A mixture that takes tokens and targets; sizes as of `moe_lm.MoELM`, family of `FAMILIES`."""

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
        family: str = "mixtral",
    ) -> None:
        super().__init__()
        import transformers

        self.vocabulary = vocabulary
        name, number, breadth, others = FAMILIES[family]
        sizes = getattr(transformers, f"{name}Config")(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_experts_per_tok=top_k,
            tie_word_embeddings=tied,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **{"intermediate_size": width, **others, number: experts, breadth: width},
        )
        device, drawn = torch.get_default_device(), torch.get_rng_state()
        with torch.device("meta"):  # weights are initialized below, module by module
            self.inner: Any = getattr(transformers, f"{name}ForCausalLM")(sizes).train()
        self.inner.set_experts_implementation("eager")
        if device.type != "meta":
            self.inner.to_empty(device=device)
            self.inner.tie_weights()
            for buffer in self.inner.buffers():
                buffer.zero_()
        with torch.device("cpu"):  # rotary buffers are determined by the sizes, and small
            rotary = type(self.inner.model.rotary_emb)
            self.inner.model.rotary_emb = rotary(self.inner.config)
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

    def sample_features(self, tokens: Tensor, targets: Tensor | None = None) -> InputFeatures:
        """Describe a sample by its tokens, each with its two predecessors."""
        return moe_lm.described(tokens, self.vocabulary)


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
