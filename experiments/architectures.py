"""Architectures of transformers in tiny random configurations, each with inputs to train on.

What it is: `ARCHITECTURES`, by name; some forty networks of every kind that the library has: dense,
mixture of experts, encoder-decoder, state space, vision, speech, protein folding. Nothing is loaded
from anywhere. What it is not: networks to learn something with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[torch.Generator, Any], dict[str, Tensor]]

_WORDS = 64


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Architecture:
    """How to build one network and its samples.

    Attributes:
        family: what kind of network it is.
        model: name of the class in transformers.
        config: name of its configuration class.
        inputs: returns the arguments of a forward, drawn from a generator.
        options: of the configuration.
        loss: returns the loss of the output; what the network itself returns by default.
        checkpoints: whether checkpointing, when it is turned on, recomputes anything.
    """

    family: str
    model: str
    config: str
    inputs: Inputs
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = _own_loss
    checkpoints: bool = True

    def build(self) -> nn.Module:
        """Return the network in training mode, with weights drawn from torch's generator."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def sample(self, model: nn.Module, seed: int) -> dict[str, Tensor]:
        """Return the inputs of one step."""
        return self.inputs(torch.Generator().manual_seed(seed), model.config)


def experts_of(model: Any) -> str:
    """Return the implementation by which a network's fused experts run, "" if it has none."""
    fused = any(
        hasattr(type(module).forward, "__wrapped__")
        and any(p.dim() == 3 for p in module.parameters(recurse=False))
        for module in model.modules()
    )
    return str(getattr(model.config, "_experts_implementation", "")) if fused else ""


def _tokens(generator: torch.Generator, rows: int = 2, longest: int = 12) -> Tensor:
    length = int(torch.randint(longest // 2, longest, (), generator=generator))
    return torch.randint(3, _WORDS, (rows, length), generator=generator)


def _language(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def _translation(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _classes(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "input_ids": _tokens(generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _pixels(generator: torch.Generator, config: Any) -> Tensor:
    size = getattr(config, "image_size", 32)
    return torch.randn(2, 3, size, size, generator=generator)


def _image(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "pixel_values": _pixels(generator, config),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _masked_image(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(generator, config)}


def _image_and_text(generator: torch.Generator, config: Any) -> dict[str, Any]:
    return {
        "pixel_values": _pixels(generator, config.vision_config),
        "input_ids": torch.randint(3, _WORDS, (2, 6), generator=generator),
        "return_loss": True,
    }


def _wave(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    length = int(torch.randint(300, 450, (), generator=generator))
    return {
        "input_values": torch.randn(2, length, generator=generator),
        "labels": torch.randint(1, 20, (2, 3), generator=generator),
    }


def _spectrum(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames, generator=generator),
        "labels": _tokens(generator),
    }


def _spectrogram(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _protein(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    length = int(torch.randint(6, 10, (), generator=generator))
    return {"input_ids": torch.randint(0, 20, (1, length), generator=generator)}


def _of_structure(output: Any) -> Tensor:
    total: Tensor = output.positions.square().mean() + output.distogram_logits.square().mean()
    total += output.plddt.mean() + output.lm_logits.square().mean()
    return total


_DECODER = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FUSED: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64}
"""A slice of an expert is whole pages of 4 KiB by these, in half precision too."""

_ENCODER = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
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
    "vocab_size": _WORDS,
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
    "vocab_size": _WORDS,
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


def _decoder(name: str, config: str = "", family: str = "dense", **options: Any) -> Architecture:
    return Architecture(
        family,
        f"{name}ForCausalLM",
        f"{config or name}Config",
        _language,
        {**_DECODER, **options},
    )


def _masked(name: str, checkpoints: bool = True, **options: Any) -> Architecture:
    return Architecture(
        "encoder",
        f"{name}ForMaskedLM",
        f"{name}Config",
        _language,
        {**_ENCODER, **options},
        checkpoints=checkpoints,
    )


def _experts(name: str, **options: Any) -> Architecture:
    return _decoder(name, family="mixture of experts", **_FUSED, **options)


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders
    "gpt2": Architecture(
        "dense",
        "GPT2LMHeadModel",
        "GPT2Config",
        _language,
        {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "gpt-neox": _decoder("GPTNeoX", rotary_pct=0.5),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.3),
    "bloom": Architecture(
        "dense",
        "BloomForCausalLM",
        "BloomConfig",
        _language,
        {"vocab_size": _WORDS, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    ),
    "falcon": _decoder(
        "Falcon", num_hidden_layers=4, new_decoder_architecture=True, num_kv_heads=2
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=6),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "gemma2": _decoder("Gemma2", num_hidden_layers=4, head_dim=8, sliding_window=6),
    "qwen2": _decoder("Qwen2", tie_word_embeddings=True),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "olmo2": _decoder("Olmo2"),
    "stablelm": _decoder("StableLm"),
    # Mixtures of experts
    "mixtral": _experts("Mixtral", num_local_experts=4, output_router_logits=True),
    "qwen2-moe": _experts(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=128,
        output_router_logits=True,
    ),
    "qwen3-moe": _experts("Qwen3Moe", num_experts=6, num_experts_per_tok=2, head_dim=8),
    "olmoe": _experts("Olmoe", num_experts=6, num_experts_per_tok=2),
    "granitemoe": _experts("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": _experts(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt-oss": _experts("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "switch": Architecture(
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        _translation,
        {**_T5, "num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1},
    ),
    "nllb-moe": Architecture(
        "mixture of experts",
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        _translation,
        {
            **_SEQUENCES,
            "num_experts": 4,
            "expert_capacity": 16,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
        },
    ),
    # State spaces and recurrence
    "mamba": _decoder(
        "Mamba", family="state space", num_hidden_layers=4, state_size=16, time_step_rank=8
    ),
    "mamba2": _decoder(
        "Mamba2",
        family="state space",
        num_hidden_layers=5,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    "rwkv": _decoder("Rwkv", family="state space", attention_hidden_size=32, context_length=64),
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        family="state space",
        hidden_size=64,
        intermediate_size=128,
        lru_width=64,
        attention_window_size=8,
        num_key_value_heads=1,
        block_types=("recurrent", "attention"),
    ),
    "jamba": _decoder(
        "Jamba",
        family="state space",
        intermediate_size=64,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    # Encoders
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "albert": _masked(
        "Albert",
        checkpoints=False,
        embedding_size=16,
        num_hidden_layers=2,
        num_hidden_groups=1,
        inner_group_num=3,
    ),
    "deberta-v2": _masked(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0
    ),
    "electra": Architecture(
        "encoder",
        "ElectraForSequenceClassification",
        "ElectraConfig",
        _classes,
        {**_ENCODER, "embedding_size": 16, "num_labels": 2},
    ),
    "modernbert": _masked(
        "ModernBert", global_attn_every_n_layers=2, local_attention=4, reference_compile=False
    ),
    "funnel": Architecture(
        "encoder",
        "FunnelForMaskedLM",
        "FunnelConfig",
        _language,
        {
            "vocab_size": _WORDS,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
        },
        checkpoints=False,
    ),
    # Encoder-decoders
    "t5": Architecture(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config", _translation, _T5
    ),
    "bart": Architecture(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig", _translation, _SEQUENCES
    ),
    "marian": Architecture(
        "encoder-decoder", "MarianMTModel", "MarianConfig", _translation, _SEQUENCES
    ),
    "pegasus": Architecture(
        "encoder-decoder",
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        _translation,
        _SEQUENCES,
    ),
    # Vision
    "vit": Architecture("vision", "ViTForImageClassification", "ViTConfig", _image, _PICTURE),
    "deit": Architecture("vision", "DeiTForImageClassification", "DeiTConfig", _image, _PICTURE),
    "beit": Architecture(
        "vision",
        "BeitForImageClassification",
        "BeitConfig",
        _image,
        {
            **_PICTURE,
            "num_hidden_layers": 4,
            "drop_path_rate": 0.3,
            "use_relative_position_bias": True,
        },
    ),
    "vit-mae": Architecture(
        "vision",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _masked_image,
        {
            **_PICTURE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "swin": Architecture(
        "vision",
        "SwinForImageClassification",
        "SwinConfig",
        _image,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.3,
            "num_labels": 2,
        },
    ),
    "convnext": Architecture(
        "vision",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _image,
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 2, 2],
            "patch_size": 2,
            "image_size": 32,
            "drop_path_rate": 0.3,
            "num_labels": 2,
        },
        checkpoints=False,
    ),
    "resnet": Architecture(
        "vision",
        "ResNetForImageClassification",
        "ResNetConfig",
        _image,
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 24, 24, 24],
            "depths": [1, 2, 2, 2],
            "layer_type": "basic",
            "num_labels": 2,
        },
        checkpoints=False,
    ),
    "clip": Architecture(
        "vision",
        "CLIPModel",
        "CLIPConfig",
        _image_and_text,
        {
            "text_config": {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": {k: v for k, v in _PICTURE.items() if k != "num_labels"},
            "projection_dim": 16,
        },
    ),
    # Speech
    "wav2vec2": Architecture("speech", "Wav2Vec2ForCTC", "Wav2Vec2Config", _wave, _SPEECH),
    "hubert": Architecture("speech", "HubertForCTC", "HubertConfig", _wave, _SPEECH),
    "whisper": Architecture(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _spectrum,
        {
            **{key: value for key, value in _SEQUENCES.items() if key != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "ast": Architecture(
        "speech",
        "ASTForAudioClassification",
        "ASTConfig",
        _spectrogram,
        {
            **{k: v for k, v in _PICTURE.items() if k != "image_size"},
            "max_length": 32,
            "num_mel_bins": 16,
            "frequency_stride": 8,
            "time_stride": 8,
        },
    ),
    # Proteins
    "esm": _masked("Esm", mask_token_id=3, position_embedding_type="rotary"),
    "esmfold": Architecture(
        "folding", "EsmForProteinFolding", "EsmConfig", _protein, _FOLDING, _of_structure, False
    ),
}
