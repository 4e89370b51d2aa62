"""`ExpertParallel`: `dynoffload.moe.MoE` with experts distributed over a process group."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynoffload.distributed.replicas import Rows
from dynoffload.errors import ConfigError
from dynoffload.managed import is_managed
from dynoffload.moe.indices import Routing
from dynoffload.moe.layer import MoE
from dynoffload.moe.parallel.choice import NUMBERS, PLAIN, Choice, Chooser
from dynoffload.moe.parallel.dispatch import dispatch
from dynoffload.moe.parallel.exchange import Exchange
from dynoffload.moe.parallel.memory import Shape, shape_of
from dynoffload.moe.parallel.pipeline import Call, pipelined
from dynoffload.moe.parallel.strategies import Strategy, strategy_of
from dynoffload.moe.parallel.tiers import FileTier
from dynoffload.units import format_bytes, parse_bytes

AUTO = "auto"


def _is_sharded(layer: nn.Module) -> bool:
    """Return whether ``fully_shard`` manages a layer's experts, directly or by an outer module."""
    from torch.distributed._composable_state import _module_state_mapping

    for state in list(_module_state_mapping.values()):
        found = state() if isinstance(state, weakref.ref) else state
        for group in getattr(found, "_fsdp_param_groups", ()):
            for one in group.fsdp_params:
                if one._module_info.module is layer and one._module_info.param_name in SHARDED:
                    return True
    return False


SHARDED = ("up", "down")
"""Names of the parameters of which each rank holds its own experts' rows."""


class ExpertParallel(MoE):
    """A mixture of experts over a process group.

    All ranks of the group create it, call it and run its backward together, each with its own
    tokens, any number or none. Rank r holds experts r·E/world to (r + 1)·E/world; router and shared
    expert are replicated, with equal initial values. The loss is the sum of the ranks' losses:
    gradients of experts belong to that sum. Those of `replicated_parameters` are of the rank's own
    tokens only; sum them over ranks, as data parallelism does.

    Args:
        width: d, of tokens.
        hidden: h, of an expert.
        experts: E, of all ranks.
        k: number of experts per token.
        group: of torch.distributed; None: the default one, or this process alone if
            torch.distributed is not initialised.
        activation: ``"swiglu"`` or ``"silu"``.
        shared: hidden width of an additional expert for every token; 0 for none.
        normalize: whether gates of a token are scaled to a sum of 1; by default if k > 1, as `MoE`.
        parts: n, into which a batch is split; equal on all ranks. ``"auto"``: the fastest of 1, 2,
            4, 8 and 16.
        strategy: how values overwritten by buffer reuse are recovered: ``"none"``, ``"S1"`` to
            ``"S4"`` (`dynoffload.moe.parallel.Strategy`); equal on all ranks. ``"auto"``: the
            fastest that fits in ``memory``.
        memory: limit of buffers and saved tensors when something is ``"auto"``: bytes, or a text
            such as ``"2GiB"``; assumes balanced loads. None: no limit. ``"auto"`` is decided at the
            first training batch of a size, which runs forward and backward up to 30 times
            and must come outside of `offload()`.
        timeout: seconds that a rank waits for the others.
        name: of the layer, for errors.
        spill_dir: directory for offloaded parts, on the CPU; by default the system's for temporary
            files.
        device: of the parameters.
        dtype: of the parameters; the router computes in float32 at least.

    Attributes:
        up: (E/world, p·h, d).
        down: (E/world, d, h).
        choice: parts and strategy, as given or as of the last training batch.

    Raises:
        ConfigError: a size is invalid, or experts cannot be distributed evenly.
        ExchangeError: from calls: a rank did not arrive in time, or is gone.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        k: int = 2,
        *,
        group: dist.ProcessGroup | None = None,
        activation: str = "swiglu",
        shared: int = 0,
        normalize: bool | None = None,
        parts: int | str = 1,
        strategy: str = "none",
        memory: int | str | None = None,
        timeout: float = 300.0,
        name: str = "moe",
        spill_dir: Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        exchange = Exchange(group, timeout=timeout, name=name)
        if experts % exchange.world:
            raise ConfigError(
                f"experts={experts} cannot be spread evenly over {exchange.world} ranks: take a "
                "multiple, or a smaller group"
            )
        self.exchange = exchange
        super().__init__(
            width,
            hidden,
            experts,
            k,
            activation=activation,
            shared=shared,
            normalize=normalize,
            device=device,
            dtype=dtype,
            held=experts // exchange.world,
        )
        self._spill_dir = spill_dir
        self.set_pipeline(parts, strategy, memory)

    def set_pipeline(
        self, parts: int | str, strategy: str, memory: int | str | None = None
    ) -> None:
        """Change how batches are split; all ranks must do so alike.

        Args:
            parts: see the class.
            strategy: see the class.
            memory: see the class.

        Raises:
            ConfigError: a value is invalid.
        """
        if isinstance(parts, str) and parts != AUTO:
            raise ConfigError(f"parts={parts!r} is neither a number nor {AUTO!r}")
        if isinstance(parts, int) and parts < 1:
            raise ConfigError(f"parts={parts} must be at least 1")
        if memory is not None and AUTO not in (parts, strategy):
            raise ConfigError(
                f"memory= bounds what is {AUTO!r}, and parts={parts!r} and strategy={strategy!r} "
                "are given"
            )
        limit = None if memory is None else parse_bytes(memory, "memory")
        strategies = tuple(Strategy) if strategy == AUTO else (strategy_of(strategy),)
        self._agreed, self._asked = False, (parts, strategy, limit)
        self._chooser: Chooser | None = None
        self.choice = PLAIN
        if AUTO in (parts, strategy):
            numbers = (parts,) if isinstance(parts, int) else NUMBERS
            self._chooser = Chooser(limit, numbers=numbers, strategies=strategies)
        else:
            self.choice = Choice(int(parts), *strategies)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, seeded by rank 0; replicated parameters are equal on all ranks.

        Collective: all ranks call it. On the meta device it does nothing.
        """
        if self.router.is_meta:
            return
        drawn = int(torch.randint(2**62, (1,)))
        seeds = [[drawn]] * self.exchange.world
        seed = self.exchange.numbers(seeds, self.router.device, "the seed of weights")[0][0]
        for offset, weights in (
            (0, (self.router, self.shared_up, self.shared_down)),
            (1 + self.exchange.rank, (self.up, self.down)),
        ):
            random = torch.Generator(self.router.device).manual_seed((seed + offset) % 2**63)
            for weight in weights:
                if weight is not None:
                    bound = 1 / math.sqrt(weight.shape[-1])
                    nn.init.uniform_(weight, -bound, bound, generator=random)
        nn.init.zeros_(self.choice_bias)

    @property
    def has_part_of_experts(self) -> bool:
        """Whether other ranks hold other experts; read by sessions and checkpoints."""
        return self.exchange.world > 1

    def rows_of_experts(self) -> Iterator[Rows]:
        """Yield the parameters of which other ranks hold other rows; called by checkpoints."""
        for parameter in (self.up, self.down):
            held = len(parameter)
            yield Rows(parameter, self.exchange.rank * held, self.exchange.world * held)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state; copies and pickles choose parts and strategy again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_pipeline(*self._asked)

    def extra_repr(self) -> str:
        """See `torch.nn.Module.extra_repr`."""
        where = f"rank {self.exchange.rank} of {self.exchange.world}"
        parts, strategy = self.choice
        chosen = " (auto)" if self._chooser else ""
        return f"{super().extra_repr()}, {where}, parts={parts}, {strategy.value}{chosen}"

    def replicated_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters replicated on every rank, whose gradients are to be summed."""
        for name, parameter in self.named_parameters():
            if name not in SHARDED:
                yield parameter

    def loads(self, routing: Routing) -> torch.Tensor:
        """Return the number of tokens of all ranks for each expert, (E,), equal on all ranks.

        Collective, as is `balance`: all ranks of the group call it. Other groups with copies of the
        experts count their own tokens: broadcast ``choice_bias`` from one of them.
        """
        own = super().loads(routing)
        each = self.exchange.gathered(own.tolist(), own.device, "tokens of each expert")
        return torch.tensor(each, dtype=own.dtype, device=own.device).sum(0)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slices of a tensor for all experts, (E, ...)."""
        held = len(self.up)
        return whole[self.exchange.rank * held : (self.exchange.rank + 1) * held]

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state of a `MoE` with the same options; of its experts, this rank's only.

        Raises:
            RuntimeError: it is of another layer, as from `torch.nn.Module.load_state_dict`.
        """
        self.load_state_dict(
            {name: self.own(one) if name in SHARDED else one for name, one in state.items()}
        )

    def _check(self) -> None:
        """Check configurations that would train wrong experts, or fail during an exchange.

        Raises:
            ConfigError: ranks split batches differently, or a wrapper treats experts as replicas.
        """
        wrapper = DistributedDataParallel._active_ddp_module
        wrapped = () if wrapper is None or self.exchange.world == 1 else wrapper._module_parameters
        if wrapper is not None and wrapper.find_unused_parameters and self.exchange.world > 1:
            own = self.exchange.group or dist.group.WORLD
            if wrapper.process_group is own:
                raise ConfigError(
                    f"layer {self.exchange.name!r} exchanges rows in the group in which "
                    "DistributedDataParallel reduces gradients, whose order differs between ranks "
                    "where they leave out other layers (find_unused_parameters=True), so ranks "
                    "could wait for each other: give the layer group=dist.new_group()"
                )
        if any(one is self.up or one is self.down for one in wrapped):
            raise ConfigError(
                f"the experts of layer {self.exchange.name!r} are other ones on each rank, and "
                "DistributedDataParallel has given all ranks those of the first: make the model "
                "anew, and call dynoffload.moe.parallel.keep_apart(model) before it is wrapped"
            )
        if self._agreed:
            return
        if self.exchange.world > 1 and _is_sharded(self):
            raise ConfigError(
                f"the experts of layer {self.exchange.name!r} are other ones on each rank, and "
                "fully_shard has taken them for one tensor of all ranks: make the model anew, and "
                "leave them out by ignored_params={layer.up, layer.down}"
            )
        parts, strategy, limit = self._asked
        given = [
            0 if isinstance(parts, str) else parts,
            -1 if strategy == AUTO else list(Strategy).index(strategy_of(strategy)),
            -1 if limit is None else limit,
        ]
        found = self.exchange.gathered(given, self.router.device, "parts and strategy")
        if any(one != found[0] for one in found):
            memory = "" if limit is None else f", memory={format_bytes(limit)}"
            raise ConfigError(
                f"layer {self.exchange.name!r} has parts={parts!r}, strategy={strategy!r}{memory} "
                f"on rank {self.exchange.rank}, and others on another rank: give all ranks the same"
            )
        self._agreed = True

    def mix(self, tokens: torch.Tensor, routing: Routing, gates: torch.Tensor) -> torch.Tensor:
        """See `MoE.mix`."""
        self._check()
        kind = tokens.device.type
        result = tokens.dtype
        if torch.is_autocast_enabled(kind):
            tokens = tokens.to(torch.get_autocast_dtype(kind))
        gates = gates.to(tokens.dtype)
        up, down = self.up.to(tokens.dtype), self.down.to(tokens.dtype)
        chosen = routing.token_expert_indices
        with torch.autocast(kind, enabled=False):
            if self._chooser and torch.is_grad_enabled():
                self.choice = self._choose(self._chooser, tokens, chosen, gates, up, down)
            call = self._call(self.choice, tokens, chosen, gates)
            return pipelined(tokens, gates, up, down, call).to(result)

    def _choose(
        self,
        chooser: Chooser,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        gates: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> Choice:
        """Return how to split a batch; collective."""
        needs = any(one.requires_grad for one in (tokens, gates, up, down))
        given = [float(len(tokens)), float(needs)]
        size, trains = self.exchange.largest(given, tokens.device, "sizes of batches")
        if not size or not trains:  # nothing to split, or no backward to time
            return self.choice if size else PLAIN
        on_cpu = tokens.device.type == "cpu"
        own = [tokens.detach().requires_grad_(), gates.detach().requires_grad_()]
        own += [one.detach().requires_grad_(one.requires_grad) for one in (up, down)]

        def seconds(choice: Choice) -> float:
            if is_managed(self):
                raise ConfigError(
                    f"layer {self.exchange.name!r} has parts={self._asked[0]!r}, "
                    f"strategy={self._asked[1]!r}, and times trials of its first batch of "
                    f"{int(size)} tokens, which no budget of offload() bounds: train on one batch "
                    "of that size before the block, or give parts= and strategy="
                )
            start = time.perf_counter()
            call = self._call(choice, own[0], chosen, own[1])
            out = pipelined(own[0], own[1], own[2], own[3], call)
            torch.autograd.grad(
                out, [one for one in own if one.requires_grad], torch.ones_like(out)
            )
            if not on_cpu:
                torch.accelerator.synchronize(tokens.device)
            passed = [time.perf_counter() - start]
            return self.exchange.largest(passed, tokens.device, "times of a trial")[0]

        # Outer hooks must not see the tensors that trials save for backward.
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            shape = self._shape(int(size), tokens.element_size())
            return chooser.choose(shape, seconds, offloads=on_cpu)

    def _call(
        self, choice: Choice, tokens: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor
    ) -> Call:
        """Exchange the dispatch plan with the other ranks, and return the call."""
        grads = torch.is_grad_enabled()
        sent = dispatch(
            self.exchange,
            chosen,
            gates.detach(),
            len(self.up),
            choice.parts,
            need_tokens=grads and tokens.requires_grad,
            need_gates=grads and gates.requires_grad,
        )
        offloads = grads and choice.strategy.offloads
        if offloads and tokens.device.type != "cpu":
            raise ConfigError(
                f"layer {self.exchange.name!r} has strategy={choice.strategy.value!r}, which "
                f"offloads to a file from the CPU alone, and its tokens are on {tokens.device}: "
                "take 'none' or 'S4'"
            )
        tier = FileTier(self._spill_dir, timeout=self.exchange.timeout) if offloads else None
        return Call(self.exchange, sent, self.activation, choice.strategy, tier)

    def _shape(self, tokens: int, itemsize: int) -> Shape:
        first, world = self.activation.parts, self.exchange.world
        sizes = (self.k, self.experts, world, self.width, self.hidden, first, itemsize)
        return shape_of(tokens, *sizes)
