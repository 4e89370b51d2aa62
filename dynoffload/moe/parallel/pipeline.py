"""The parts of a batch through dispatch, experts and combination, one part beside the next.

`pipelined` is one node of autograd over all parts. While the experts work on a part, the rows of
the next are dispatched and those of the last come back, by the backend's own threads or stream.

Source: MPipeMoE (arXiv 2506.22175).

[Note: buffers]  Memory is used again where the strategy says so. In forward there are then two
buffers for rows that were dispatched, of which one is read and one filled, two for results, of
which one is filled and one leaves, one for the middle if it is offloaded, and one each for what
goes out and comes home; in backward two more for gradients of dispatched rows. A buffer is free
once its exchange was waited for, and its copy below was made. Otherwise a part's rows and middle
are kept as autograd keeps tensors, and all else is freed as it goes.

[Note: order]  All ranks start the same exchanges in the same order: in forward S0, then for each
part p: S(p+1), R(p); in backward, if rows are sent again, each part's before its gradients. Whether
gradients of tokens or gates go home is what any rank needs, which is agreed with the counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.memory.reused import reused
from dynoffload.moe.activations import Activation
from dynoffload.moe.parallel import computation
from dynoffload.moe.parallel.dispatch import Dispatch, Part
from dynoffload.moe.parallel.exchange import Exchange, Pending
from dynoffload.moe.parallel.tiers import Copying, FileTier, Stored
from dynoffload.planning.strategies import Strategy


class Buffers:
    """Memory of one purpose, of which as much is made as is in use at one time.

    Args:
        like: dtype and device.
        width: of a row.
        rows: of the largest part.
        reuse: what is freed is taken again; otherwise it is dropped.
    """

    def __init__(self, like: torch.Tensor, width: int, rows: int, reuse: bool) -> None:
        self._like, self._width, self._rows, self._reuse = like, width, rows, reuse
        self._free: list[torch.UntypedStorage] = []

    def take(self, rows: int) -> torch.Tensor:
        """Return memory of ``rows`` rows, with whatever bytes."""
        if not self._reuse:
            return self._like.new_empty(rows, self._width)
        if self._free:
            whole = self._like.new_empty(0).set_(self._free.pop())
        else:
            whole = self._like.new_empty(self._rows * self._width)
        return whole[: rows * self._width].view(rows, self._width)

    def free(self, rows: torch.Tensor) -> None:
        """Nobody reads or writes these rows any more."""
        if self._reuse:
            self._free.append(rows.untyped_storage())


@dataclass(eq=False)
class Call:
    """What forward and backward of one call share.

    Attributes:
        exchange: of the layer.
        sent: what goes where.
        activation: of the experts.
        strategy: for what reuse overwrites.
        tier: takes what is offloaded; None where the strategy offloads nothing.
        rows: of each part, that were offloaded.
        middles: of each part, in pieces by expert, that were offloaded.
    """

    exchange: Exchange
    sent: Dispatch
    activation: Activation
    strategy: Strategy
    tier: FileTier | None
    rows: list[Stored] = field(default_factory=list)
    middles: list[list[tuple[slice, Stored]]] = field(default_factory=list)

    def buffers(self, like: torch.Tensor, width: int, rows: list[int]) -> Buffers:
        """Return memory for parts of so many rows."""
        return Buffers(like, width, max(rows), self.strategy.reuses)

    def lower(self, tensor: torch.Tensor) -> Stored:
        """Begin to copy what is to be offloaded."""
        if self.tier is None:
            raise ConfigError(f"{self.strategy.value} offloads, and there is no tier to offload to")
        return self.tier.store(tensor)

    def both(self, like: torch.Tensor) -> tuple[Buffers, Buffers]:
        """Return memory for rows at home, and for those that were dispatched."""
        parts, width = self.sent.parts, like.shape[1]
        return (
            self.buffers(like, width, [part.sent for part in parts]),
            self.buffers(like, width, [part.taken for part in parts]),
        )

    def middle(self, like: torch.Tensor, width: int) -> Buffers:
        """Return memory for the middle."""
        return self.buffers(like, width, [computation.middle_rows(p) for p in self.sent.parts])

    def out(self, given: torch.Tensor, part: int, home: Buffers, into: torch.Tensor) -> _Travel:
        """Start to dispatch the rows of ``given`` that a part sends."""
        one = self.sent.parts[part]
        rows = home.take(one.sent)
        torch.index_select(given, 0, one.index, out=rows)
        told = f"rows of part {part + 1} of {len(self.sent.parts)}"
        pending = self.exchange.start(into, rows, one.takes, one.gives, told)
        return _Travel(pending, rows, home)

    def back(
        self, given: torch.Tensor, part: int, away: Buffers, home: Buffers, into: torch.Tensor
    ) -> _Return:
        """Start to send the results of a part home, where they are added to their tokens."""
        one = self.sent.parts[part]
        rows = home.take(one.sent)
        told = f"results of part {part + 1} of {len(self.sent.parts)}"
        pending = self.exchange.start(rows, given, one.gives, one.takes, told)
        return _Return(_Travel(pending, given, away), rows, home, one, into)


@dataclass(eq=False)
class _Travel:
    """Rows on their way, whose memory is free once they have left."""

    pending: Pending
    rows: torch.Tensor
    memory: Buffers

    def wait(self) -> None:
        self.pending.wait()
        self.memory.free(self.rows)
        del self.rows


@dataclass(eq=False)
class _Return:
    """Results on their way home."""

    travel: _Travel
    rows: torch.Tensor
    memory: Buffers
    part: Part
    into: torch.Tensor

    def wait(self) -> None:
        """Add them to their tokens, rank by rank, so that sums have one order."""
        self.travel.wait()
        at = 0
        for count in self.part.gives:
            own = slice(at, at + count)
            self.into.index_add_(0, self.part.index[own], self.rows[own])
            at += count
        self.memory.free(self.rows)
        del self.rows


class _Pipelined(torch.autograd.Function):
    """See the module."""

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
        lowers_rows = keeps and strategy.offloads_rows
        lowers_middle = keeps and strategy.offloads_middle
        keeps_both = keeps and not strategy.reuses
        out = torch.zeros_like(tokens)
        home, away = call.both(tokens)
        middles = call.middle(tokens, up.shape[1])
        kept: list[torch.Tensor] = []
        given = away.take(parts[0].taken)
        arriving = call.out(tokens, 0, home, given)
        leaving: _Return | None = None
        below: torch.Tensor | None = None  # rows that are being copied below
        middle: torch.Tensor | None = None
        for number, part in enumerate(parts):
            arriving.wait()
            now = given
            if below is not None:
                call.rows[-1].wait()
                away.free(below)
            if number + 1 < len(parts):
                given = away.take(parts[number + 1].taken)
                arriving = call.out(tokens, number + 1, home, given)
            if lowers_rows:
                call.rows.append(call.lower(now))
                below = now
            if lowers_middle:
                for _, stored in call.middles[-1] if number else []:
                    stored.wait()
                call.middles.append([])
            if middle is not None:
                middles.free(middle)
            middle = (
                middles.take(computation.middle_rows(part)) if lowers_middle or keeps_both else None
            )
            made = away.take(part.taken)
            store = None
            if lowers_middle and middle is not None:
                store = partial(_lower, call, middle)
            computation.forward(part, now, up, down, middle, made, call.activation, store)
            if keeps_both and middle is not None:
                kept += [now, middle]
            elif not lowers_rows:
                away.free(now)
            del now
            if leaving is not None:
                leaving.wait()
            leaving = call.back(made, number, away, home, out)
            del made, store
        if leaving is not None:
            leaving.wait()
        if below is not None:
            call.rows[-1].wait()
        for _, stored in call.middles[-1] if lowers_middle else []:
            stored.wait()
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
        home, away = call.both(d_out)
        middles = call.middle(d_out, up.shape[1])
        d_tokens = d_out.new_zeros(shape) if sent.need_tokens else None
        d_up = reused(up).zero_() if ctx.needs_input_grad[2] else None
        d_down = reused(down).zero_() if ctx.needs_input_grad[3] else None
        d_rows = None
        if sent.need_gates:
            d_rows = d_out.new_zeros(sum(sent.takes), gates_shape[1])

        def begin(number: int) -> tuple[torch.Tensor, torch.Tensor, list[_Travel | Copying]]:
            """Have a part's rows again, and begin to dispatch the gradients of its results."""
            waits: list[_Travel | Copying] = []
            if strategy.reuses:
                given = away.take(parts[number].taken)
                if strategy.sends_again:
                    waits.append(call.out(rest[0], number, home, given))
                else:
                    waits.append(call.rows[number].load(given))
            else:
                given = rest[2 * number]
            d_made = away.take(parts[number].taken)
            waits.append(call.out(d_out, number, home, d_made))
            return given, d_made, waits

        def load(number: int) -> tuple[torch.Tensor | None, list[Copying]]:
            """Begin to have a part's middle again, unless it is computed."""
            if strategy.computes_again:
                return None, []
            if not strategy.reuses:
                return rest[2 * number + 1], []
            middle = middles.take(computation.middle_rows(parts[number]))
            return middle, [one.load(middle[rows]) for rows, one in call.middles[number]]

        following, following_middle = begin(0), load(0)
        leaving: _Return | None = None
        for number, part in enumerate(parts):
            given, d_made, waits = following
            middle, loading = following_middle
            for one in waits:
                one.wait()
            if number + 1 < len(parts):
                following = begin(number + 1)
            for copy in loading:
                copy.wait()
            d_given = away.take(part.taken) if sent.need_tokens else None
            pairs = torch.empty_like(part.gates) if sent.need_gates else None
            computation.backward(
                part, given, up, down, middle, d_made, call.activation, d_given, pairs, d_up, d_down
            )
            if d_rows is not None and pairs is not None:
                d_rows[part.places] = pairs[part.routing.token_index_map]
            if strategy.reuses:
                away.free(given)
            away.free(d_made)
            if middle is not None and strategy.reuses:
                middles.free(middle)
            del given, d_made, middle, waits, loading
            if number + 1 < len(parts):
                following_middle = load(number + 1)
            else:
                del following, following_middle
            if leaving is not None:
                leaving.wait()
            if d_given is not None and d_tokens is not None:
                leaving = call.back(d_given, number, away, home, d_tokens)
            del d_given
        if leaving is not None:
            leaving.wait()
        d_gates = _gates_home(call, d_rows, gates_shape) if d_rows is not None else None
        needs = ctx.needs_input_grad
        return (
            d_tokens if needs[0] else None,
            d_gates if needs[1] else None,
            d_up,
            d_down,
            None,
            None,
        )


def _lower(call: Call, middle: torch.Tensor, rows: slice) -> None:
    """Begin to copy an expert's rows of the middle below."""
    call.middles[-1].append((rows, call.lower(middle[rows])))


def _gates_home(call: Call, d_rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the gradients of this rank's gates, (L, k), of which each rank made some."""
    sent = call.sent
    found = d_rows.new_empty(len(sent.index), shape[1])
    told = "gradients of gates"
    call.exchange.start(found, d_rows, sent.gives, sent.takes, told).wait()
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
    """Return the sum of each token's experts, wherever they are, by their gates.

    Args:
        tokens: of this rank, (L, d).
        gates: (L, k), of the dtype of ``tokens``.
        up: of this rank's experts, (E/world, p·h, d).
        down: (E/world, d, h).
        call: what goes where, and how.

    Raises:
        ExchangeError: another rank did not come in time, or is gone.
        SpillError: what was offloaded cannot be written or read.
    """
    keeps = torch.is_grad_enabled() and any(one.requires_grad for one in (tokens, gates, up, down))
    return _Pipelined.apply(tokens, gates, up, down, call, keeps)  # type: ignore[no-any-return, no-untyped-call]
