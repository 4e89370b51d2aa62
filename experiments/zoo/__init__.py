"""Dynamic networks to try dynoffload on, by name.

What it is: `build` makes a network, `samples` the stream of real data it is trained on. What it is
not: anything that imports the networks before one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from dynoffload.datasets.sources import Split
    from dynoffload.experiments.zoo.building import ZooSample

NETWORKS = ("moe", "tree")
"""The networks that most is shown on: the MoE language model and the Tree-LSTM."""

FUSED = "fused"
"""The MoE language model's sizes as a Mixtral of transformers, where that is installed."""

TRUNK = "evoformer"
"""A trunk of AlphaFold's kind, which recycles."""

FOLDING = "esmfold"
"""ESMFold of transformers, where that is installed."""

_MODULES = {
    "moe": "moe_lm",
    "tree": "tree_lstm",
    FUSED: "fused_moe",
    TRUNK: "evoformer",
    FOLDING: "esm_fold",
    "switch": "switch_lm",
    "tree-cnn": "tree_cnn",
    "early-lstm": "early_lstm",
    "masked": "masked_lm",
    "exits": "multi_scale",
    "skips": "skip_net",
    "depths": "mixture_of_depths",
    "slim": "slimmable",
    "gan": "unrolled_gan",
}
ALL = tuple(_MODULES)
"""The names of all networks."""


def build(name: str, preset: str = "tiny", **overrides: Any) -> nn.Module:
    """Return a network of the zoo.

    Args:
        name: one of `ALL`.
        preset: the sizes: ``tiny``, ``small`` or ``base``; some have more, see ``PRESETS`` of the
            network's module.
        overrides: ``device``, ``seed`` and the sizes of the network's configuration.

    Raises:
        ValueError: there is no such network or preset.
    """
    network: nn.Module = _module(name).build(preset, **overrides)
    return network


def samples(
    name: str, split: Split | str = "train", *, seed: int = 0, **shape: Any
) -> Iterator[ZooSample]:
    """Yield samples for a network of the zoo for ever, the same ones for the same arguments.

    Args:
        name: one of `ALL`.
        split: ``"train"`` or ``"held-out"`` files, families or images.
        seed: of the draws.
        shape: what ``samples`` of the network's module takes.

    Raises:
        ValueError: there is no such network, or the shape is impossible.
    """
    stream: Iterator[ZooSample] = _module(name).samples(split, seed=seed, **shape)
    return stream


def _module(name: str) -> Any:
    if name not in _MODULES:
        raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(ALL)}")
    return import_module(f"dynoffload.experiments.zoo.{_MODULES[name]}")
