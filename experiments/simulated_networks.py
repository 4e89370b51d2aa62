"""Networks that simulations and estimates are compared by, each with its samples.

Networks of the zoo and of transformers with random weights, small enough to be trained in seconds.
Experiments choose which are fitted to and which validated by, and keep the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_WORDS = 512
_ROWS, _LENGTH = 2, 48


@dataclass(frozen=True)
class Sample:
    """The arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def call(self, model: nn.Module) -> Any:
        """Return the loss."""
        return model(*self.args, **self.kwargs).loss


@dataclass(frozen=True)
class Kind:
    """A network with its samples.

    Attributes:
        build: makes it, always with the same weights.
        samples: yields its samples for a seed.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[int], Iterator[Sample]]


def zoo_kind(name: str, preset: str, shape: Mapping[str, int], **sizes: Any) -> Kind:
    """Return a network of the zoo; ``shape`` is its samples', ``sizes`` are its configuration's."""
    from dynoffload.experiments import zoo

    def samples(seed: int) -> Iterator[Sample]:
        split = "train" if seed else "held-out"
        for one in zoo.samples(name, split, seed=seed, **shape):
            yield Sample(one.args, source=one.source)

    return Kind(lambda: zoo.build(name, preset, **sizes), samples)


def _t5(length: int, **sizes: int) -> Kind:
    import torch

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = T5Config(vocab_size=512, decoder_start_token_id=0, pad_token_id=0, **sizes)
        model: nn.Module = T5ForConditionalGeneration(config)
        return model.train()

    def samples(seed: int) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            source, target = torch.randint(3, 512, (2, 1, length), generator=generator)
            yield Sample(kwargs={"input_ids": source, "labels": target})

    return Kind(build, samples)


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


def _gpt2(width: int, layers: int, heads: int) -> Kind:
    return _transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        _text,
        vocab_size=_WORDS,
        n_positions=64,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
    )


def _vit(width: int, layers: int, heads: int) -> Kind:
    return _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        _images,
        image_size=96,
        patch_size=16,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_labels=8,
    )


_TEXT = {"rows": 1, "length": 24}
_TREES = {"max_nodes": 40}
_PROTEINS = {"max_length": 32, "max_depth": 8}

NETWORKS: dict[str, Callable[[], Kind]] = {
    "moe": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=256, width=512, layers=4),
    "tree": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=320, embedding=160),
    # Slices of 172.5 and 86.25 KiB are no whole pages, so experts are paged whole.
    "mixtral": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=120, width=184, layers=12),
    "t5": lambda: _t5(32, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8),
    "evoformer": lambda: zoo_kind("evoformer", "small", _PROTEINS, blocks=4),
    "esmfold": lambda: zoo_kind("esmfold", "small", _PROTEINS, blocks=4),
    "gpt2": lambda: _gpt2(384, 6, 6),
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
    "vit": lambda: _vit(384, 6, 6),
    "mixtral (fit)": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=104, width=168, layers=10),
    "moe (fit)": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=192, width=640, layers=5, experts=6),
    "tree (fit)": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=256, embedding=256),
    "t5 (fit)": lambda: _t5(24, d_model=320, d_kv=40, d_ff=640, num_layers=4, num_heads=8),
    "evoformer (fit)": lambda: zoo_kind("evoformer", "small", _PROTEINS, blocks=3),
    "gpt2 (fit)": lambda: _gpt2(320, 8, 5),
    "vit (fit)": lambda: _vit(320, 5, 5),
}
"""By name; those to fit, so called, are other networks than those to validate by."""
