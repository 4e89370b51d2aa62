"""Dynamic networks to try dynoffload on, by name: `build` makes one, `samples` yields its inputs.

Each network has a module with its class (whose arguments are sizes), ``PRESETS`` of sizes by name,
and ``samples``. The module is imported on first use, and does not depend on offloading.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dynoffload.datasets.sources import Split
    from dynoffload.experiments.zoo.building import ZooSample

NETWORKS = ("moe", "tree")
"""The networks of most demonstrations: the MoE language model and the Tree-LSTM."""

FUSED = "fused"
"""transformers' Mixtral in the MoE language model's sizes; needs transformers."""

TRUNK = "evoformer"
"""A trunk like AlphaFold's, with recycling."""

FOLDING = "esmfold"
"""transformers' ESMFold; needs transformers."""

_PLACES = {
    "moe": "moe_lm:MoELM",
    "tree": "tree_lstm:TreeLSTM",
    FUSED: "fused_moe:FusedMoELM",
    TRUNK: "evoformer:Evoformer",
    FOLDING: "esm_fold:EsmFold",
    "switch": "switch_lm:SwitchLM",
    "early-lstm": "early_lstm:EarlyLSTM",
    "exits": "multi_scale:MultiScale",
    "depths": "mixture_of_depths:MixtureOfDepths",
    "gan": "unrolled_gan:UnrolledGAN",
}
ALL = tuple(_PLACES)
"""The names of all networks."""


def build(
    name: str,
    preset: str = "tiny",
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **sizes: Any,
) -> nn.Module:
    """Return a network of the zoo, with weights determined by its seed.

    Args:
        name: one of `ALL`.
        preset: the sizes: ``tiny``, ``small`` or ``base``; some have others, see `presets`.
        seed: of the initial weights.
        device: where to build it; on ``"meta"`` it has shapes and no bytes.
        sizes: arguments of the network's class that override the preset's.

    Raises:
        ValueError: there is no such network or preset, or the sizes are invalid.
        TypeError: the class has no such argument.
    """
    import torch

    known = presets(name)
    if preset not in known:
        raise ValueError(f"no preset {preset!r} of {name}; there are {', '.join(known)}")
    chosen = {**known[preset], **sizes}
    for key, size in chosen.items():
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            raise ValueError(f"{key}={size} must be at least 1")
    kind = getattr(_module(name), _PLACES[name].partition(":")[2])
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        network: nn.Module = kind(**chosen)
    return network


def presets(name: str) -> dict[str, dict[str, Any]]:
    """Return preset name -> sizes of a network."""
    known: dict[str, dict[str, Any]] = _module(name).PRESETS
    return known


def samples(
    name: str, split: Split | str = "train", *, seed: int = 0, **shape: Any
) -> Iterator[ZooSample]:
    """Yield an endless stream of samples for a network; the same arguments give the same samples.

    Args:
        name: one of `ALL`.
        split: ``"train"`` or ``"held-out"`` files, families or images.
        seed: of the draws.
        shape: arguments of ``samples`` in the network's module, or of its data set.

    Raises:
        ValueError: there is no such network, or the shape is invalid.
    """
    stream: Iterator[ZooSample] = _module(name).samples(split, seed=seed, **shape)
    return stream


def _module(name: str) -> Any:
    if name not in _PLACES:
        raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(ALL)}")
    return import_module(f"dynoffload.experiments.zoo.{_PLACES[name].partition(':')[0]}")
