"""Networks with samples, shared by the experiments on costs, simulations and estimates.

Networks of the zoo and of transformers with random weights: small enough to train in seconds, wide
enough that arithmetic and memory matter. Experiments keep networks for fitting and for validation
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dynoffload.experiments.zoo.building import ZooSample

Inputs = Callable[[torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A network with its samples.

    Attributes:
        build: builds it, always with the same weights.
        samples: seed -> its samples.
        adamw: options that select AdamW's implementation.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[int], Iterator[ZooSample]]
    adamw: Mapping[str, Any] = field(default_factory=dict)


def zoo_kind(
    name: str,
    preset: str,
    shape: Mapping[str, int],
    adamw: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Subject:
    """Return a zoo network; ``shape`` is its samples' and ``sizes`` its configuration."""
    from dynoffload.experiments import zoo

    def samples(seed: int) -> Iterator[ZooSample]:
        return zoo.samples(name, "train" if seed else "held-out", seed=seed, **shape)

    return Subject(lambda: zoo.build(name, preset, **sizes), samples, adamw or {})


def transformers_kind(
    name: str,
    inputs: Inputs,
    options: Mapping[str, Any],
    adamw: Mapping[str, Any] | None = None,
) -> Subject:
    """Return an architecture of `ARCHITECTURES` with other options and samples."""
    from dynoffload.experiments.architectures import ARCHITECTURES

    found = ARCHITECTURES[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return replace(found, options={**found.options, **options}).build()

    def samples(seed: int) -> Iterator[ZooSample]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield ZooSample((), kwargs=inputs(generator))

    return Subject(build, samples, adamw or {})


def texts(rows: int, longest: int, words: int, shortest: int | None = None) -> Inputs:
    """Return inputs: texts of ``longest // 4`` (or ``shortest``) to ``longest`` tokens."""
    least = shortest or longest // 4

    def inputs(generator: torch.Generator) -> dict[str, Tensor]:
        length = int(torch.randint(least, longest + 1, (), generator=generator))
        ids = torch.randint(3, words, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return inputs


def pairs(rows: int, longest: int, words: int, shortest: int | None = None) -> Inputs:
    """Return inputs: pairs of texts as for translation."""
    one = texts(rows, longest, words, shortest)
    return lambda generator: {
        "input_ids": one(generator)["input_ids"],
        "labels": one(generator)["labels"],
    }


def images(least: int, most: int, size: int, classes: int = 2) -> Inputs:
    """Return inputs: batches of ``least`` to ``most`` images."""

    def inputs(generator: torch.Generator) -> dict[str, Tensor]:
        rows = int(torch.randint(least, most + 1, (), generator=generator))
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
            "labels": torch.randint(0, classes, (rows,), generator=generator),
        }

    return inputs


# For simulations and estimates

_WORDS = 512
_TEXT = {"rows": 1, "length": 24}
_TREES = {"max_nodes": 40}
_PROTEINS = {"max_length": 32, "max_depth": 8}
_TEXTS = texts(2, 48, _WORDS, 48)


def _t5(length: int, layers: int, **sizes: int) -> Subject:
    sizes |= {"num_layers": layers, "num_decoder_layers": layers, "vocab_size": _WORDS}
    return transformers_kind("t5", pairs(1, length, _WORDS, length), sizes)


def _gpt2(width: int, layers: int, heads: int) -> Subject:
    sizes = {"vocab_size": _WORDS, "n_embd": width, "n_layer": layers, "n_head": heads}
    return transformers_kind("gpt2", _TEXTS, sizes)


def _vit(width: int, layers: int, heads: int) -> Subject:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    picture = {"image_size": 96, "patch_size": 16, "num_labels": 8, "num_attention_heads": heads}
    return transformers_kind("vit", images(2, 2, 96, 8), {**sizes, **picture})


def _wide(name: str, hidden: int, inner: int, heads: int, **more: int) -> Subject:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    few = {"vocab_size": _WORDS, "num_hidden_layers": 6, "max_position_embeddings": 512}
    return transformers_kind(name, _TEXTS, {**sizes, **few, **more})


NETWORKS: dict[str, Callable[[], Subject]] = {
    "moe": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=256, width=512, layers=4),
    "tree": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=320, embedding=160),
    # Slices of 172.5 and 86.25 KiB are not whole pages, so the experts tensor is paged as one.
    "mixtral": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=120, width=184, layers=12),
    "t5": lambda: _t5(32, 6, d_model=256, d_kv=32, d_ff=1024, num_heads=8),
    "evoformer": lambda: zoo_kind("evoformer", "small", _PROTEINS, blocks=4),
    "esmfold": lambda: zoo_kind("esmfold", "small", _PROTEINS, blocks=4),
    "gpt2": lambda: _gpt2(384, 6, 6),
    "bert": lambda: _wide("bert", 320, 1280, 5),
    "llama": lambda: _wide("llama", 384, 1024, 6),
    "vit": lambda: _vit(384, 6, 6),
    "mixtral (fit)": lambda: zoo_kind("fused", "tiny", _TEXT, hidden=104, width=168, layers=10),
    "moe (fit)": lambda: zoo_kind("moe", "tiny", _TEXT, hidden=192, width=640, layers=5, experts=6),
    "tree (fit)": lambda: zoo_kind("tree", "tiny-untied", _TREES, hidden=256, embedding=256),
    "t5 (fit)": lambda: _t5(24, 4, d_model=320, d_kv=40, d_ff=640, num_heads=8),
    "evoformer (fit)": lambda: zoo_kind("evoformer", "small", _PROTEINS, blocks=3),
    "gpt2 (fit)": lambda: _gpt2(320, 8, 5),
    "vit (fit)": lambda: _vit(320, 5, 5),
}
"""Networks by name; those named "(fit)" differ from those for validation."""


@dataclass(frozen=True)
class Setting:
    """One training: a network, the share of its footprint that is its budget, and a policy."""

    network: str
    share: float
    policy: str

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.network}, {self.share:.3g}, {self.policy}"


SETTINGS = (
    *(Setting("moe", share, "pilot") for share in (0.5, 0.25, 0.125)),
    Setting("moe", 0.25, "repeat"),
    Setting("moe", 0.25, "on-demand"),
    Setting("moe", 0.125, "on-demand"),
    *(Setting("tree", share, "pilot") for share in (0.5, 0.25, 0.125)),
    Setting("tree", 0.25, "repeat"),
    Setting("tree", 0.25, "on-demand"),
    *(Setting("mixtral", share, "repeat") for share in (0.5, 0.25, 0.125)),
    Setting("mixtral", 0.25, "on-demand"),
    *(Setting("t5", share, "repeat") for share in (0.5, 0.25, 0.125)),
    Setting("t5", 0.25, "on-demand"),
)
"""Settings for validation."""
FIT = tuple(
    Setting(network, share, policy)
    for network, more in (
        *((f"{name} (fit)", True) for name in ("moe", "tree", "t5", "mixtral")),
        *((f"{name} (fit)", False) for name in ("evoformer", "gpt2", "vit")),
    )
    for share, policy in (
        *((1.3, "repeat"), (0.5, "repeat"), (0.25, "repeat"), (0.3, "on-demand")),
        *([(0.2, "on-demand")] if more else []),
    )
)
"""Settings on which the runtime's overhead is fitted, from little traffic to much."""


# For costs: operator sizes vary widely, from a tree's small cells to products that dominate a
# step.

_MANY = 4096
_SIZES = {"vocab_size": _MANY, "hidden_size": 384, "intermediate_size": 1024}
_BROAD = {**_SIZES, "num_attention_heads": 6, "max_position_embeddings": 512}
_NARROW = {**_BROAD, "hidden_size": 256, "num_attention_heads": 4}
_EXPERTS = {**_NARROW, "moe_intermediate_size": 512, "head_dim": 64}
_GPT2 = {"vocab_size": _MANY, "n_embd": 384, "n_head": 6, "n_positions": 512}
_MAMBA = {"vocab_size": _MANY, "hidden_size": 256, "num_hidden_layers": 2}
_T5 = {"vocab_size": _MANY, "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_heads": 6}
_INNER = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
_PICTURE = {**_INNER, "image_size": 96, "patch_size": 8}
_RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256]}
_FUSED, _FOREACH = {"fused": True}, {"foreach": True}

COSTED: dict[str, Callable[[], Subject]] = {
    "moe": lambda: zoo_kind("moe", "small", {"rows": 1, "length": 256}, _FUSED),
    "tree": lambda: zoo_kind("tree", "small", {}),
    "evoformer": lambda: zoo_kind("evoformer", "small", {}),
    "gpt2": lambda: transformers_kind("gpt2", texts(2, 256, _MANY), _GPT2),
    "llama": lambda: transformers_kind("llama", texts(2, 256, _MANY), _BROAD, _FOREACH),
    "qwen3-moe": lambda: transformers_kind("qwen3-moe", texts(1, 256, _MANY), _EXPERTS),
    "mamba": lambda: transformers_kind("mamba", texts(1, 64, _MANY), _MAMBA),
    "bert": lambda: transformers_kind("bert", texts(4, 128, _MANY), _BROAD, _FUSED),
    "t5": lambda: transformers_kind("t5", pairs(2, 128, _MANY), _T5),
    "vit": lambda: transformers_kind("vit", images(1, 8, 96), _PICTURE, _FOREACH),
    "resnet": lambda: transformers_kind("resnet", images(1, 8, 64), _RESNET),
}
"""Networks by name: three of the zoo, and eight architectures of transformers."""
