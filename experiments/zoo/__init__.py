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

TRUNK = "evoformer"
"""A trunk of AlphaFold's kind, which recycles."""

FOLDING = "esmfold"
"""ESMFold of transformers, where that is installed."""

_KNOWN = ", ".join((*NETWORKS, TRUNK, FUSED, FOLDING))


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
        name: one of `NETWORKS`, or `FUSED`, `TRUNK` or `FOLDING`.
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
    if name == TRUNK:
        from dynoffload.experiments.zoo import evoformer

        return evoformer.build(preset, **overrides)
    if name == FOLDING:
        from dynoffload.experiments.zoo import esm_fold

        return esm_fold.build(preset, **overrides)
    raise ValueError(f"no network {name!r} in the zoo; there are {_KNOWN}")


def samples(
    name: str, split: Split | str = "train", *, seed: int = 0, **shape: Any
) -> Iterator[ZooSample]:
    """Yield samples for a network of the zoo for ever, the same ones for the same arguments.

    Args:
        name: one of `NETWORKS`, or `FUSED`, `TRUNK` or `FOLDING`.
        split: ``"train"`` or ``"held-out"`` files, or families.
        seed: of the draws.
        shape: what `dynoffload.datasets.text.batches` (for the MoE: ``rows``, ``length``),
            `dynoffload.datasets.trees.trees` (``min_nodes``, ``max_nodes``) or
            `dynoffload.datasets.proteins.alignments` (for the trunk and ESMFold) takes.

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
    if name in (TRUNK, FOLDING):
        from dynoffload.datasets import proteins

        drawn = proteins.alignments(split, seed=seed, **shape)
        return (ZooSample((batch,), batch.source) for batch in drawn)
    raise ValueError(f"no network {name!r} in the zoo; there are {_KNOWN}")
