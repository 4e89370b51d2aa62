"""Architectures of transformers in tiny random configurations, each with training inputs.

`ARCHITECTURES` has some fifty networks of every kind in the library: dense, mixture of experts,
encoder-decoder, state space, vision, speech, protein folding. Weights and inputs are random; no
file is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynoffload.experiments import architecture_inputs as inputs

Inputs = Callable[[torch.Generator, Any], dict[str, Tensor]]


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Architecture:
    """Builds one network and its samples.

    Attributes:
        model: name of the class in transformers; its configuration class has the same prefix.
        inputs: draws the arguments of one forward from a generator.
        options: of the configuration.
        loss: returns the loss of the output; by default ``output.loss``.
        checkpoints: whether activation checkpointing recomputes anything when enabled.
    """

    model: str
    inputs: Inputs
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = _own_loss
    checkpoints: bool = True

    def build(self) -> nn.Module:
        """Return the network in training mode, with weights from torch's default generator."""
        import transformers

        config = re.sub(r"(For\w+|LMHeadModel|MTModel|Model)$", "Config", self.model)
        made = getattr(transformers, config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(made)
        return model.train()

    def sample(self, model: nn.Module, seed: int) -> dict[str, Tensor]:
        """Return the inputs of one step."""
        return self.inputs(torch.Generator().manual_seed(seed), model.config)


def experts_of(model: Any) -> str:
    """Return the implementation of a network's fused experts, "" if it has none."""
    fused = any(
        hasattr(type(module).forward, "__wrapped__")
        and any(p.dim() == 3 for p in module.parameters(recurse=False))
        for module in model.modules()
    )
    return str(getattr(model.config, "_experts_implementation", "")) if fused else ""


def _of_structure(output: Any) -> Tensor:
    total: Tensor = output.positions.square().mean() + output.distogram_logits.square().mean()
    total += output.plddt.mean() + output.lm_logits.square().mean()
    return total


_ENCODER = {
    "vocab_size": inputs.WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_FUSED: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64}
"""With these sizes an expert's slice is a multiple of 4 KiB, in half precision too."""

_PICTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 2,
}
_SEQUENCES = {
    "vocab_size": inputs.WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "encoder_layerdrop": 0.3,
    "decoder_layerdrop": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5 = {
    "vocab_size": inputs.WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_SPEECH = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.4,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}
_FOLDING = {
    "vocab_list": [
        *("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-"),
        *("<null_1>", "<mask>"),
    ],
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "is_folding_model": True,
    "esmfold_config": {
        "trunk": {
            "num_blocks": 2,
            "sequence_state_dim": 64,
            "pairwise_state_dim": 32,
            "sequence_head_width": 16,
            "pairwise_head_width": 8,
            "position_bins": 4,
            "max_recycles": 2,
            "structure_module": {
                "sequence_dim": 32,
                "pairwise_dim": 16,
                "ipa_dim": 4,
                "resnet_dim": 8,
                "num_heads_ipa": 4,
                "num_qk_points": 2,
                "num_v_points": 2,
                "num_blocks": 2,
                "num_transition_layers": 1,
                "num_resnet_blocks": 1,
            },
        },
        "fp16_esm": False,
        "lddt_head_hid_dim": 8,
    },
}


def _of(
    model: str,
    inputs: Inputs,
    *options: Mapping[str, Any],
    loss: Callable[[Any], Tensor] = _own_loss,
    checkpoints: bool = True,
) -> Architecture:
    """Return an architecture; later options override earlier ones."""
    merged = {name: value for one in options for name, value in one.items()}
    return Architecture(model, inputs, merged, loss, checkpoints)


def _decoder(name: str, *options: Mapping[str, Any]) -> Architecture:
    return _of(f"{name}ForCausalLM", inputs.language, _DECODER, *options)


def _experts(name: str, *options: Mapping[str, Any]) -> Architecture:
    return _decoder(name, _FUSED, *options)


def _masked(name: str, *options: Mapping[str, Any], checkpoints: bool = True) -> Architecture:
    model = f"{name}ForMaskedLM"
    return _of(model, inputs.language, _ENCODER, *options, checkpoints=checkpoints)


def _pair(model: str, options: Mapping[str, Any]) -> Architecture:
    return _of(model, inputs.translation, options)


def _seen(name: str, *options: Mapping[str, Any], checkpoints: bool = True) -> Architecture:
    model = f"{name}ForImageClassification"
    return _of(model, inputs.image, *options, checkpoints=checkpoints)


def _less(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != key}


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders
    "gpt2": _of(
        "GPT2LMHeadModel",
        inputs.language,
        {"vocab_size": inputs.WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "gpt-neox": _decoder("GPTNeoX", {"rotary_pct": 0.5}),
    "opt": _decoder("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.3}),
    "bloom": _of(
        "BloomForCausalLM",
        inputs.language,
        {"vocab_size": inputs.WORDS, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    ),
    "falcon": _decoder(
        "Falcon", {"num_hidden_layers": 4, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", {"sliding_window": 6}),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "gemma2": _decoder("Gemma2", {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6}),
    "qwen2": _decoder("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": _decoder("Qwen3", {"head_dim": 8}),
    "olmo2": _decoder("Olmo2"),
    "stablelm": _decoder("StableLm"),
    # Mixtures of experts
    "mixtral": _experts("Mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    "qwen2-moe": _experts(
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 128},
        {"output_router_logits": True},
    ),
    "qwen3-moe": _experts("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}),
    "olmoe": _experts("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": _experts("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": _experts(
        "DeepseekV3",
        {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
        {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "v_head_dim": 8},
        {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    ),
    "gpt-oss": _experts(
        "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    ),
    "switch": _of(
        "SwitchTransformersForConditionalGeneration",
        inputs.translation,
        _T5,
        {"num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1},
    ),
    "nllb-moe": _of(
        "NllbMoeForConditionalGeneration",
        inputs.translation,
        _SEQUENCES,
        {"num_experts": 4, "expert_capacity": 16, "encoder_sparse_step": 2},
        {"decoder_sparse_step": 2},
    ),
    # State spaces and recurrence
    "mamba": _decoder("Mamba", {"num_hidden_layers": 4, "state_size": 16, "time_step_rank": 8}),
    "mamba2": _decoder(
        "Mamba2",
        {"num_hidden_layers": 5, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
        {"chunk_size": 4},
    ),
    "rwkv": _decoder("Rwkv", {"attention_hidden_size": 32, "context_length": 64}),
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        {"hidden_size": 64, "intermediate_size": 128, "lru_width": 64},
        {"attention_window_size": 8, "num_key_value_heads": 1},
        {"block_types": ("recurrent", "attention")},
    ),
    "jamba": _decoder(
        "Jamba",
        {"intermediate_size": 64, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        {"expert_layer_offset": 1, "use_mamba_kernels": False},
    ),
    # Encoders
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "albert": _masked(
        "Albert",
        {"embedding_size": 16, "num_hidden_layers": 2, "num_hidden_groups": 1},
        {"inner_group_num": 3},
        checkpoints=False,
    ),
    "deberta-v2": _masked(
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "electra": _of(
        "ElectraForSequenceClassification",
        inputs.classes,
        _ENCODER,
        {"embedding_size": 16, "num_labels": 2},
    ),
    "modernbert": _masked(
        "ModernBert",
        {"global_attn_every_n_layers": 2, "local_attention": 4, "reference_compile": False},
    ),
    "funnel": _of(
        "FunnelForMaskedLM",
        inputs.language,
        {"vocab_size": inputs.WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
        {"block_sizes": [1, 1]},
        checkpoints=False,
    ),
    # Encoder-decoders
    "t5": _pair("T5ForConditionalGeneration", _T5),
    "bart": _pair("BartForConditionalGeneration", _SEQUENCES),
    "marian": _pair("MarianMTModel", _SEQUENCES),
    "pegasus": _pair("PegasusForConditionalGeneration", _SEQUENCES),
    # Vision
    "vit": _seen("ViT", _PICTURE),
    "deit": _seen("DeiT", _PICTURE),
    "beit": _seen(
        "Beit",
        _PICTURE,
        {"num_hidden_layers": 4, "drop_path_rate": 0.3, "use_relative_position_bias": True},
    ),
    "vit-mae": _of(
        "ViTMAEForPreTraining",
        inputs.masked_image,
        _PICTURE,
        {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1},
        {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32},
    ),
    "swin": _seen(
        "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "window_size": 4, "num_labels": 2},
        {"depths": [1, 2], "num_heads": [2, 4], "drop_path_rate": 0.3},
    ),
    "convnext": _seen(
        "ConvNext",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 2], "image_size": 32},
        {"patch_size": 2, "drop_path_rate": 0.3, "num_labels": 2},
        checkpoints=False,
    ),
    "resnet": _seen(
        "ResNet",
        {"embedding_size": 16, "hidden_sizes": [16, 24, 24, 24], "depths": [1, 2, 2, 2]},
        {"layer_type": "basic", "num_labels": 2},
        checkpoints=False,
    ),
    "clip": _of(
        "CLIPModel",
        inputs.image_and_text,
        {"text_config": {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2}},
        {"vision_config": _less(_PICTURE, "num_labels"), "projection_dim": 16},
    ),
    # Speech
    "wav2vec2": _of("Wav2Vec2ForCTC", inputs.wave, _SPEECH),
    "hubert": _of("HubertForCTC", inputs.wave, _SPEECH),
    "whisper": _of(
        "WhisperForConditionalGeneration",
        inputs.spectrum,
        _less(_SEQUENCES, "max_position_embeddings"),
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "ast": _of(
        "ASTForAudioClassification",
        inputs.spectrogram,
        _less(_PICTURE, "image_size"),
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    # Proteins
    "esm": _masked("Esm", {"mask_token_id": 3, "position_embedding_type": "rotary"}),
    "esmfold": _of(
        "EsmForProteinFolding", inputs.protein, _FOLDING, loss=_of_structure, checkpoints=False
    ),
}
