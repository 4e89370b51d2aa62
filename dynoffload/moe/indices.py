"""Index structures of a routing decision: which tokens go to which expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynoffload.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Routing:
    """Routing of L tokens to k of E experts each.

    Attributes:
        expert_token_indices: int64, (L·k,); the tokens of expert 0 in order, then of expert 1, ...;
            choices of no expert come last.
        expert_token_offsets: int64, (E + 1,); where each expert's tokens begin and end.
        token_expert_indices: int64, (L, k); the experts of each token, as the router gave them.
        token_index_map: int64, (L, k); position of each choice in ``expert_token_indices``.
        starts: the offsets as Python ints, (E + 1).
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
        """Return the positions of one expert's tokens in ``expert_token_indices``."""
        return slice(self.starts[expert], self.starts[expert + 1])

    def hit(self) -> list[int]:
        """Return the experts that have tokens, in order."""
        return [e for e in range(self.experts) if self.starts[e] < self.starts[e + 1]]


def route(chosen: torch.Tensor, experts: int) -> Routing:
    """Build the index structures of a routing decision, by one stable sort.

    Args:
        chosen: integers, (L, k), each from 0 to ``experts``, without repeats within a token. The
            value ``experts`` means no expert here, as for experts of other processes.
        experts: number of experts.

    Raises:
        ConfigError: ``chosen`` has another shape or dtype, values out of range, or an expert twice
            for one token.
    """
    if chosen.dim() != 2 or chosen.is_floating_point() or chosen.is_complex():
        raise ConfigError(
            f"a router's choice is integers of shape (tokens, k), not {chosen.dtype} of "
            f"{tuple(chosen.shape)}"
        )
    chosen = chosen.long()
    if not chosen.numel():
        empty = chosen.new_zeros(0)
        zeros = (0,) * (experts + 1)
        return Routing(empty, chosen.new_zeros(experts + 1), chosen, chosen.clone(), zeros)
    of, choices = chosen.reshape(-1).sort(stable=True)
    tokens = choices // chosen.shape[1]
    places = torch.empty_like(choices)
    places[choices] = torch.arange(len(choices), device=chosen.device)
    offsets = torch.searchsorted(of, torch.arange(experts + 1, device=chosen.device))
    twice = ((of[1:] == of[:-1]) & (tokens[1:] == tokens[:-1]) & (of[1:] < experts)).any()
    *starts, low, high, wrong = torch.cat((offsets, of[:1], of[-1:], twice.view(1))).tolist()
    if low < 0 or high > experts:
        raise ConfigError(
            f"a router's choice names expert {low if low < 0 else high}, and there are {experts}"
        )
    if wrong:
        raise ConfigError("a router's choice names an expert twice for one token")
    return Routing(tokens, offsets, chosen, places.view_as(chosen), tuple(starts))
