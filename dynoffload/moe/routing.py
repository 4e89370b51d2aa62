"""Which token goes to which expert, as `dynoffload.moe.indices.route` makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Routing:
    """The choices of L tokens, k of E experts each.

    Attributes:
        expert_token_indices: int64, (L·k,); the tokens of expert 0 in order, then of 1, ...; what
            is for no expert stands last.
        expert_token_offsets: int64, (E + 1,); where each expert's tokens begin, and end.
        token_expert_indices: int64, (L, k); the experts of each token, as the router gave them.
        token_index_map: int64, (L, k); where each choice stands in ``expert_token_indices``.
        starts: the offsets as numbers, (E + 1).
    """

    expert_token_indices: torch.Tensor
    expert_token_offsets: torch.Tensor
    token_expert_indices: torch.Tensor
    token_index_map: torch.Tensor
    starts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens, L."""
        return int(self.token_expert_indices.shape[0])

    @property
    def experts(self) -> int:
        """The number of experts, E."""
        return len(self.starts) - 1

    def of(self, expert: int) -> slice:
        """Return where the tokens of one expert stand in ``expert_token_indices``."""
        return slice(self.starts[expert], self.starts[expert + 1])

    def hit(self) -> list[int]:
        """Return the experts that have tokens, in order."""
        return [e for e in range(self.experts) if self.starts[e] < self.starts[e + 1]]
