"""transformers' ESMFold with random weights, trained to predict distances between residues.

`EsmForProteinFolding` (Lin et al., 2023, Science 379) with a forward that takes the zoo's protein
samples and returns a loss. It has a frozen language model, a folding trunk that recycles, and a
structure module. The structure losses are left out; the module is only trained to keep its output
small. Nothing is masked: the network's own masking does not support batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.proteins import Alignments, alignments
from dynoffload.experiments.zoo.building import singly
from dynoffload.profiler.input_features import InputFeatures

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"language": 32, "layers": 2, "blocks": 2, "sequence": 32, "pair": 16, "width": 8},
    "small": {"language": 128, "layers": 4, "blocks": 8, "sequence": 256, "pair": 64, "width": 32},
}
"""Sizes by name: width and layers of the language model; the trunk's blocks, and its widths per
residue, per pair and per head."""
samples = singly(alignments)


class FoldOutput(NamedTuple):
    """Result of forward.

    Attributes:
        loss: scalar: mean cross entropy of the distances and of the residues, and a thousandth of
            the mean square of the atoms' positions.
        distances: ``[rows, length, length, 64]``: logits.
    """

    loss: Tensor
    distances: Tensor


class EsmFold(nn.Module):
    """The network; it folds the queries of alignments."""

    def __init__(
        self, language: int, layers: int, blocks: int, sequence: int, pair: int, width: int
    ) -> None:
        super().__init__()
        from transformers import EsmConfig, EsmForProteinFolding
        from transformers.models.esm.configuration_esm import get_default_vocab_list

        structure = {
            "sequence_dim": sequence,
            "pairwise_dim": pair,
            "ipa_dim": 8,
            "resnet_dim": pair,
            "num_heads_ipa": 4,
            "num_blocks": 2,
        }
        trunk = {
            "num_blocks": blocks,
            "sequence_state_dim": sequence,
            "pairwise_state_dim": pair,
            "sequence_head_width": width,
            "pairwise_head_width": width,
            "dropout": 0.1,
            "structure_module": structure,
        }
        config = EsmConfig(
            vocab_size=33,
            hidden_size=language,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * language,
            pad_token_id=1,
            mask_token_id=32,
            position_embedding_type="rotary",
            is_folding_model=True,
            vocab_list=get_default_vocab_list(),
            esmfold_config={"fp16_esm": False, "trunk": trunk},
        )
        self.net = EsmForProteinFolding(config)

    def forward(self, sample: Alignments) -> FoldOutput:
        """Fold each row's query.

        Args:
            sample: only the first row of its alignments is used.
        """
        hidden = sample.hidden[:, 0]
        query = torch.where(hidden != -100, hidden, sample.tokens[:, 0])
        out = self.net(query, num_recycles=sample.cycles - 1)
        distances: Tensor = out.distogram_logits
        apart = F.cross_entropy(distances.flatten(0, 2), sample.distances.flatten())
        residues = F.cross_entropy(out.lm_logits.flatten(0, 1), query.flatten())
        return FoldOutput(apart + residues + 1e-3 * out.positions.square().mean(), distances)

    def sample_features(self, sample: Alignments) -> InputFeatures:
        """Describe a sample by its shape and its number of trunk runs."""
        rows, _, length = sample.tokens.shape
        shape = {"rows": rows, "length": length, "cycles": sample.cycles}
        return InputFeatures(values={name: float(value) for name, value in shape.items()})
