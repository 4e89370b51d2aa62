"""ESMFold of transformers, with random weights, trained to say how far residues are apart.

What it is: `EsmForProteinFolding` (Lin et al., 2023, Science 379) behind a forward call that takes
the zoo's protein samples and returns a loss: a language model whose weights stay as they are, a
folding trunk that recycles, and a structure module. What it is not: ESMFold's training; the losses
of the structure are left out, so the structure module runs and learns nothing but to be small, and
nothing is masked, as the network's own masking takes no batch.

How it fits: a client's own network at a size of ours, beside the zoo's own trunk (`evoformer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.proteins import Alignments, alignments
from dynoffload.datasets.sources import Split
from dynoffload.experiments.zoo.building import ZooSample
from dynoffload.profiler.input_features import InputFeatures

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"language": 32, "layers": 2, "blocks": 2, "sequence": 32, "pair": 16, "width": 8},
    "small": {"language": 128, "layers": 4, "blocks": 8, "sequence": 256, "pair": 64, "width": 32},
}
"""Sizes by name: width and layers of the language model; blocks of the trunk, its widths of a
residue and of a pair, and that of one head."""


class FoldOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        loss: scalar: mean cross entropy of the distances and of the residues, and a thousandth of
            the mean square of the atoms' places.
        distances: ``[rows, length, length, 64]``: logits.
    """

    loss: Tensor
    distances: Tensor


class EsmFold(nn.Module):
    """The network, over the queries of alignments."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        from transformers import EsmForProteinFolding

        self.net = EsmForProteinFolding(_config(sizes))

    def forward(self, sample: Alignments) -> FoldOutput:
        """Fold each row's query.

        Args:
            sample: of its alignments only the first row is used.
        """
        hidden = sample.hidden[:, 0]
        query = torch.where(hidden != -100, hidden, sample.tokens[:, 0])
        out = self.net(query, num_recycles=sample.cycles - 1)
        distances: Tensor = out.distogram_logits
        apart = F.cross_entropy(distances.flatten(0, 2), sample.distances.flatten())
        told = F.cross_entropy(out.lm_logits.flatten(0, 1), query.flatten())
        return FoldOutput(apart + told + 1e-3 * out.positions.square().mean(), distances)

    def sample_features(self, sample: Alignments) -> InputFeatures:
        """Describe a sample by its shape and by how often the trunk runs for it."""
        rows, _, length = sample.tokens.shape
        shape = {"rows": rows, "length": length, "cycles": sample.cycles}
        return InputFeatures(values={name: float(value) for name, value in shape.items()})


def _config(sizes: dict[str, int]) -> Any:
    from transformers import EsmConfig
    from transformers.models.esm.configuration_esm import get_default_vocab_list

    structure = {
        "sequence_dim": sizes["sequence"],
        "pairwise_dim": sizes["pair"],
        "ipa_dim": 8,
        "resnet_dim": sizes["pair"],
        "num_heads_ipa": 4,
        "num_blocks": 2,
    }
    trunk = {
        "num_blocks": sizes["blocks"],
        "sequence_state_dim": sizes["sequence"],
        "pairwise_state_dim": sizes["pair"],
        "sequence_head_width": sizes["width"],
        "pairwise_head_width": sizes["width"],
        "dropout": 0.1,
        "structure_module": structure,
    }
    return EsmConfig(
        vocab_size=33,
        hidden_size=sizes["language"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=4,
        intermediate_size=4 * sizes["language"],
        pad_token_id=1,
        mask_token_id=32,
        position_embedding_type="rotary",
        is_folding_model=True,
        vocab_list=get_default_vocab_list(),
        esmfold_config={"fp16_esm": False, "trunk": trunk},
    )


def build(
    preset: str = "tiny", *, seed: int = 0, device: str | torch.device = "cpu", **overrides: int
) -> EsmFold:
    """Return a network of a preset's sizes with weights that follow from ``seed``.

    Args:
        preset: a key of `PRESETS`.
        seed: of the weights.
        device: where to build it.
        overrides: of the preset's sizes.

    Raises:
        ValueError: if there is no such preset, or no size of such a name.
    """
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r} of ESMFold; there are {', '.join(PRESETS)}")
    sizes = PRESETS[preset]
    if unknown := overrides.keys() - sizes:
        raise ValueError(f"no size {min(unknown)!r} of ESMFold; there are {', '.join(sizes)}")
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return EsmFold({**sizes, **overrides})


def samples(split: Split | str = "train", *, seed: int = 0, **shape: int) -> Iterator[ZooSample]:
    """Yield alignments; see `dynoffload.datasets.proteins.alignments` for ``shape``."""
    drawn = alignments(split, seed=seed, **shape)
    return (ZooSample((batch,), batch.source) for batch in drawn)
