"""Networks of `dynoffload.experiments.estimates` beside those of the simulation's validation.

What it is: the zoo's trunks, and networks of transformers with random weights, each with samples.
What it is not: networks that anything was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.simulated_run import NETWORKS as SIMULATED
from dynoffload.experiments.simulated_run import Kind, Sample, zoo_kind

if TYPE_CHECKING:
    import torch
    from torch import nn

_WORDS = 512
_ROWS, _LENGTH = 2, 48


def _transformers(
    model: str, config: str, inputs: Callable[[torch.Generator], dict[str, Any]], **options: Any
) -> Kind:
    import torch

    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made.train()

    def samples(seed: int) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield Sample(kwargs=inputs(generator))

    return Kind(build, samples)


def _text(generator: torch.Generator) -> dict[str, Any]:
    import torch

    ids = torch.randint(3, _WORDS, (_ROWS, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _images(generator: torch.Generator) -> dict[str, Any]:
    import torch

    pixels = torch.randn(_ROWS, 3, 96, 96, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 8, (_ROWS,), generator=generator)}


_PROTEINS = {"max_length": 32, "max_depth": 8}

NETWORKS: dict[str, Callable[[], Kind]] = {
    "moe": SIMULATED["moe"],
    "tree": SIMULATED["tree"],
    "evoformer": lambda: zoo_kind("evoformer", "small", _PROTEINS, blocks=4),
    "esmfold": lambda: zoo_kind("esmfold", "small", _PROTEINS, blocks=4),
    "t5": SIMULATED["t5"],
    "mixtral": SIMULATED["mixtral"],
    "gpt2": lambda: _transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        _text,
        vocab_size=_WORDS,
        n_positions=64,
        n_embd=384,
        n_layer=6,
        n_head=6,
    ),
    "bert": lambda: _transformers(
        "BertForMaskedLM",
        "BertConfig",
        _text,
        vocab_size=_WORDS,
        hidden_size=320,
        intermediate_size=1280,
        num_hidden_layers=6,
        num_attention_heads=5,
    ),
    "llama": lambda: _transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        _text,
        vocab_size=_WORDS,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    "vit": lambda: _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        _images,
        image_size=96,
        patch_size=16,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_labels=8,
    ),
}
"""By name: four of the zoo, six of transformers."""
