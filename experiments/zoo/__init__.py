"""Dynamic networks to try dynoffload on, by name.

What it is: `build` makes a network, `samples` the stream of real data it is trained on. What it is
not: anything that imports the networks before one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from dynoffload.datasets.sources import Split

NETWORKS = ("moe", "tree")
"""The names of the networks: the MoE language model and the Tree-LSTM."""

FUSED = "fused"
"""The MoE language model's sizes as a Mixtral of transformers, where that is installed."""


@dataclass(frozen=True)
class ZooSample:
    """The input of one training step.

    Attributes:
        args: the positional arguments of the network's forward call; its result has a ``.loss``.
        source: the name of the file the sample was cut from.
    """

    args: tuple[Any, ...]
    source: str


def build(name: str, preset: str = "tiny", **overrides: Any) -> nn.Module:
    """Return a network of the zoo.

    Args:
        name: one of `NETWORKS`, or `FUSED`.
        preset: the sizes: ``tiny``, ``small`` or ``base``; the MoE has ``-wide`` ones too, the
            Tree-LSTM ``tiny-untied``.
        overrides: ``device``, ``seed`` and the sizes of the network's configuration.

    Raises:
        ValueError: if there is no such network or preset.
    """
    if name == "moe":
        from dynoffload.experiments.zoo import moe_lm

        return moe_lm.build(preset, **overrides)
    if name == "tree":
        from dynoffload.experiments.zoo import tree_lstm

        return tree_lstm.build(preset, **overrides)
    if name == FUSED:
        from dynoffload.experiments.zoo import fused_moe

        return fused_moe.build(preset, **overrides)
    raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(NETWORKS)}")


def samples(
    name: str, split: Split | str = "train", *, seed: int = 0, **shape: Any
) -> Iterator[ZooSample]:
    """Yield samples for a network of the zoo for ever, the same ones for the same arguments.

    Args:
        name: one of `NETWORKS`, or `FUSED`.
        split: ``"train"`` or ``"held-out"`` files.
        seed: of the draws.
        shape: what `dynoffload.datasets.text.batches` (for the MoE: ``rows``, ``length``) or
            `dynoffload.datasets.trees.trees` (``min_nodes``, ``max_nodes``) takes.

    Raises:
        ValueError: if there is no such network, or the shape is impossible.
    """
    if name in ("moe", FUSED):
        from dynoffload.datasets import text

        batches = text.batches(split, seed=seed, **shape)
        return (ZooSample((batch.tokens, batch.targets), batch.source) for batch in batches)
    if name == "tree":
        from dynoffload.datasets import trees

        return (ZooSample((tree,), tree.source) for tree in trees.trees(split, seed=seed, **shape))
    raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(NETWORKS)}")
