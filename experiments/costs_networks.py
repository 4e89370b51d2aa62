"""The networks that costs are measured on: the zoo's, and larger ones of transformers.

What it is: `NETWORKS`, by name, each with its samples. What it is not: the tiny configurations of
`dynoffload.experiments.architectures`, whose operators take no longer than a call does; here the
same architectures are wide enough that arithmetic and memory show. Their sizes are spread on
purpose: from a tree of small cells to products that take most of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from dynoffload.experiments import zoo
from dynoffload.experiments.architectures import ARCHITECTURES, Architecture, Inputs

_WORDS = 4096


@dataclass(frozen=True)
class Network:
    """A network and what it is trained on.

    Attributes:
        build: makes it, with random weights.
        samples: yields the arguments of its forward calls, ever others: by position and by name.
        loss: makes the loss of an output.
        adamw: options of its optimizer: which of AdamW's implementations it runs.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[nn.Module], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]
    loss: Callable[[Any], Tensor]
    adamw: Mapping[str, Any] = field(default_factory=dict)


def _of_zoo(name: str, preset: str, **shape: Any) -> Network:
    def samples(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return ((sample.args, {}) for sample in zoo.samples(name, seed=0, **shape))

    def loss(output: Any) -> Tensor:
        found: Tensor = output.loss
        return found

    return Network(lambda: zoo.build(name, preset), samples, loss)


def _of_transformers(name: str, inputs: Inputs | None = None, **options: Any) -> Network:
    """Return an architecture with other options and, if given, other samples."""
    found: Architecture = ARCHITECTURES[name]
    larger = replace(found, options={**found.options, **options}, inputs=inputs or found.inputs)

    def samples(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return (((), larger.sample(model, seed)) for seed in count())

    return Network(larger.build, samples, larger.loss)


def _ids(generator: torch.Generator, rows: int, longest: int) -> Tensor:
    length = int(torch.randint(longest // 4, longest + 1, (), generator=generator))
    return torch.randint(3, _WORDS, (rows, length), generator=generator)


def _texts(rows: int, longest: int) -> Inputs:
    """Texts of a quarter to all of ``longest`` tokens."""

    def inputs(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
        ids = _ids(generator, rows, longest)
        return {"input_ids": ids, "labels": ids}

    return inputs


def _pairs(rows: int, longest: int) -> Inputs:
    """Texts and their translations."""

    def inputs(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
        return {
            "input_ids": _ids(generator, rows, longest),
            "labels": _ids(generator, rows, longest),
        }

    return inputs


def _images(most: int) -> Inputs:
    """One image to ``most`` images."""

    def inputs(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
        rows = int(torch.randint(1, most + 1, (), generator=generator))
        size = getattr(config, "image_size", 64)
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
            "labels": torch.randint(0, 2, (rows,), generator=generator),
        }

    return inputs


_WIDE: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
_EXPERTS: dict[str, Any] = {**_WIDE, "hidden_size": 256, "num_attention_heads": 4}

NETWORKS: dict[str, Network] = {
    "moe": _of_zoo("moe", "small", rows=1, length=256),
    "tree": _of_zoo("tree", "small"),
    "evoformer": _of_zoo("evoformer", "small"),
    "gpt2": _of_transformers(
        "gpt2", _texts(2, 256), vocab_size=_WORDS, n_embd=384, n_head=6, n_positions=512
    ),
    "llama": _of_transformers("llama", _texts(2, 256), **_WIDE),
    "qwen3-moe": _of_transformers(
        "qwen3-moe", _texts(1, 256), **_EXPERTS, moe_intermediate_size=512, head_dim=64
    ),
    "mamba": _of_transformers(
        "mamba", _texts(1, 64), vocab_size=_WORDS, hidden_size=256, num_hidden_layers=2
    ),
    "bert": _of_transformers("bert", _texts(4, 128), **_WIDE),
    "t5": _of_transformers(
        "t5", _pairs(2, 128), vocab_size=_WORDS, d_model=384, d_kv=64, d_ff=1024, num_heads=6
    ),
    "vit": _of_transformers(
        "vit", _images(8), hidden_size=384, intermediate_size=1024, num_attention_heads=6,
        image_size=96, patch_size=8,
    ),
    "resnet": _of_transformers(
        "resnet", _images(8), embedding_size=32, hidden_sizes=[32, 64, 128, 256], image_size=64
    ),
}  # fmt: skip
"""By name: three of the zoo, and eight architectures of transformers."""
for _name, _adamw in {
    "moe": "fused",
    "bert": "fused",
    "llama": "foreach",
    "vit": "foreach",
}.items():
    NETWORKS[_name] = replace(NETWORKS[_name], adamw={_adamw: True})
