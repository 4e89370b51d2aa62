"""Pipelines the parts of a batch through dispatch, experts and combination.

`pipelined` is one autograd node over all parts. While the experts process a part, the rows of the
next are dispatched and those of the previous return, by the backend's own threads or stream.

Source: MPipeMoE (arXiv 2506.22175).

[Note: memory]  A part's rows and middle are saved for backward, as by autograd, or recovered as the
strategy defines. All other buffers live until their exchange is waited for. So there are at most
two of each kind, for any number of parts. Copies to the tier of one part are complete before those
of the next part begin.

[Note: order]  All ranks start the same exchanges in the same order: in forward S(0), then for each
part p: S(p+1), R(p), where S sends and R returns rows; in backward, if rows are sent again, each
part's before its gradients. Gradients of tokens or gates are returned if any rank needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dynoffload.memory.reused import reused
from dynoffload.moe.activations import Activation
from dynoffload.moe.parallel import computation
from dynoffload.moe.parallel.dispatch import Dispatch, Part
from dynoffload.moe.parallel.exchange import Exchange, Pending
from dynoffload.moe.parallel.strategies import Strategy
from dynoffload.moe.parallel.tiers import Copy, FileTier


@dataclass(eq=False)
class Call:
    """State shared by forward and backward of one call.

    Attributes:
        exchange: of the layer.
        sent: the dispatch plan.
        activation: of the experts.
        strategy: for values that are not saved.
        tier: stores offloaded tensors; None if the strategy offloads nothing.
        rows: offloaded rows of each part.
        middles: offloaded middle of each part, in pieces by expert.
    """

    exchange: Exchange
    sent: Dispatch
    activation: Activation
    strategy: Strategy
    tier: FileTier | None
    rows: list[Copy] = field(default_factory=list)
    middles: list[list[tuple[slice, Copy]]] = field(default_factory=list)

    def lower_middle(self, middle: torch.Tensor, rows: slice) -> None:
        """Start to offload an expert's rows of the last part's middle."""
        assert self.tier is not None
        self.middles[-1].append((rows, self.tier.store(middle[rows])))

    def out(self, given: torch.Tensor, part: int) -> _Arriving:
        """Start to dispatch the rows of ``given`` that belong to a part."""
        one = self.sent.parts[part]
        rows, into = given.index_select(0, one.index), given.new_empty(one.taken, given.shape[1])
        what = f"rows of part {part + 1} of {len(self.sent.parts)}"
        return _Arriving(self.exchange.start(into, rows, one.takes, one.gives, what), into)

    def back(self, given: torch.Tensor, part: int, into: torch.Tensor) -> _Return:
        """Start to return the results of a part, to be added to their tokens."""
        one = self.sent.parts[part]
        rows = given.new_empty(one.sent, given.shape[1])
        what = f"results of part {part + 1} of {len(self.sent.parts)}"
        pending = self.exchange.start(rows, given, one.gives, one.takes, what)
        return _Return(pending, rows, one, into)


@dataclass(eq=False)
class _Arriving:
    """Rows being received."""

    pending: Pending | Copy | None
    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        if self.pending is not None:
            self.pending.wait()
        return self.rows


@dataclass(eq=False)
class _Return:
    """Results being returned to their tokens' ranks."""

    pending: Pending
    rows: torch.Tensor
    part: Part
    into: torch.Tensor

    def wait(self) -> None:
        """Add the results to their tokens, rank by rank, so that sums have a fixed order."""
        self.pending.wait()
        at = 0
        for count in self.part.gives:
            own = slice(at, at + count)
            self.into.index_add_(0, self.part.index[own], self.rows[own])
            at += count
        del self.rows


class _Pipelined(torch.autograd.Function):
    """Autograd node of `pipelined`; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        gates: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        call: Call,
        keeps: bool,
    ) -> torch.Tensor:
        strategy, parts = call.strategy, call.sent.parts
        tier = call.tier if keeps else None
        lowers_middle = tier is not None and strategy.offloads_middle
        keeps_both = keeps and not strategy.reuses
        out = torch.zeros_like(tokens)
        kept: list[torch.Tensor] = []
        arriving: _Arriving | None = call.out(tokens, 0)
        leaving: _Return | None = None
        for number, part in enumerate(parts):
            given, arriving = arriving.wait(), None  # type: ignore[union-attr]
            if number + 1 < len(parts):
                arriving = call.out(tokens, number + 1)
            _wait_for_copies(call)
            middle, store = None, None
            if tier is not None and strategy.offloads_rows:
                call.rows.append(tier.store(given))
            if lowers_middle or keeps_both:
                middle = given.new_empty(computation.middle_rows(part), up.shape[1])
            if lowers_middle and middle is not None:
                call.middles.append([])
                store = partial(call.lower_middle, middle)
            made = torch.empty_like(given)
            computation.forward(part, given, up, down, middle, made, call.activation, store)
            if keeps_both and middle is not None:
                kept += [given, middle]
            del given, middle, store
            if leaving is not None:
                leaving.wait()
            leaving = call.back(made, number, out)
            del made
        if leaving is not None:
            leaving.wait()
        _wait_for_copies(call)
        ctx.call, ctx.shapes = call, (tokens.shape, gates.shape)
        ctx.save_for_backward(up, down, *([tokens] if strategy.sends_again else []), *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        up, down, *rest = ctx.saved_tensors
        d_out = gradients[0].contiguous()
        strategy, sent, parts = call.strategy, call.sent, call.sent.parts
        shape, gates_shape = ctx.shapes
        d_tokens = d_out.new_zeros(shape) if sent.need_tokens else None
        d_up = reused(up).zero_() if ctx.needs_input_grad[2] else None
        d_down = reused(down).zero_() if ctx.needs_input_grad[3] else None
        d_rows = None
        if sent.need_gates:
            d_rows = d_out.new_zeros(sum(sent.takes), gates_shape[1])

        def begin(number: int) -> tuple[_Arriving, _Arriving]:
            """Start to recover a part's rows, and to dispatch the gradients of its results."""
            if not strategy.reuses:
                rows = _Arriving(None, rest[2 * number])
            elif strategy.sends_again:
                rows = call.out(rest[0], number)
            else:
                into = d_out.new_empty(parts[number].taken, shape[1])
                rows = _Arriving(call.rows[number].load(into), into)
            return rows, call.out(d_out, number)

        def load(number: int) -> tuple[torch.Tensor | None, list[Copy]]:
            """Start to load a part's middle, unless it is recomputed."""
            if strategy.computes_again:
                return None, []
            if not strategy.reuses:
                return rest[2 * number + 1], []
            middle = d_out.new_empty(computation.middle_rows(parts[number]), up.shape[1])
            return middle, [one.load(middle[rows]) for rows, one in call.middles[number]]

        following: tuple[_Arriving, _Arriving] | None = begin(0)
        loaded = [load(0)]
        leaving: _Return | None = None
        for number, part in enumerate(parts):
            given, d_made = (one.wait() for one in following or ())
            following = begin(number + 1) if number + 1 < len(parts) else None
            middle, loading = loaded.pop()
            for copy in loading:
                copy.wait()
            d_given = torch.empty_like(given) if sent.need_tokens else None
            pairs = torch.empty_like(part.gates) if sent.need_gates else None
            computation.backward(
                part, given, up, down, middle, d_made, call.activation, d_given, pairs, d_up, d_down
            )
            if d_rows is not None and pairs is not None:
                d_rows[part.places] = pairs[part.routing.token_index_map]
            del given, d_made, middle, loading
            if number + 1 < len(parts):
                loaded.append(load(number + 1))
            if leaving is not None:
                leaving.wait()
            if d_given is not None and d_tokens is not None:
                leaving = call.back(d_given, number, d_tokens)
            del d_given
        if leaving is not None:
            leaving.wait()
        d_gates = _return_gate_gradients(call, d_rows, gates_shape) if d_rows is not None else None
        needs = ctx.needs_input_grad
        return (
            d_tokens if needs[0] else None,
            d_gates if needs[1] else None,
            d_up,
            d_down,
            None,
            None,
        )


def _wait_for_copies(call: Call) -> None:
    """Wait until the last part's copies to the tier are complete."""
    for stored in (*call.rows[-1:], *(one for _, one in (call.middles or [[]])[-1])):
        stored.wait()


def _return_gate_gradients(call: Call, d_rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the gradients of this rank's gates, (L, k), after collecting them from all ranks."""
    sent = call.sent
    found = d_rows.new_empty(len(sent.index), shape[1])
    what = "gradients of gates"
    call.exchange.start(found, d_rows, sent.gives, sent.takes, what).wait()
    made = d_rows.new_zeros(shape)
    row, column = sent.mine.nonzero().unbind(1)
    made[sent.index[row], column] = found[row, column]
    return made


def pipelined(
    tokens: torch.Tensor,
    gates: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, on whichever rank they are.

    Args:
        tokens: of this rank, (L, d).
        gates: (L, k), in the dtype of ``tokens``.
        up: of this rank's experts, (E/world, p·h, d).
        down: (E/world, d, h).
        call: the dispatch plan and settings.

    Raises:
        ExchangeError: another rank did not arrive in time, or is gone.
        SpillError: offloaded tensors cannot be written or read.
    """
    keeps = torch.is_grad_enabled() and any(one.requires_grad for one in (tokens, gates, up, down))
    return _Pipelined.apply(tokens, gates, up, down, call, keeps)  # type: ignore[no-any-return, no-untyped-call]
