"""Ranks that train experts spread over processes, with and without a session: no tests here.

Gradients of what is on several ranks are summed by the loop, as a user would: of the router over
all ranks, of experts over the ranks that hold the same ones.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.moe import MoE
from dynoffload.moe.parallel import ExpertParallel, clip_grad_norm_, keep_apart

CONFIG = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}


class Net(nn.Module):
    """Two layers of experts and a head."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first = ExpertParallel(
            32, 64, 4, 2, group=group, parts=2, strategy="S3", timeout=60, name="first"
        )
        self.second = ExpertParallel(
            32, 64, 4, 1, group=group, shared=16, timeout=60, name="second"
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of tokens, ``[n, 32]``."""
        one = self.first(x)
        two = self.second(one.hidden + x)
        loss: Tensor = self.head(two.hidden).square().mean()
        return loss + 0.01 * (one.balance + two.balance)


def trained(rank: int, experts: Any, data: Any, share: float | None) -> list[Tensor]:
    """Train in a group of ranks that share experts, among groups of the same."""
    torch.manual_seed(0)
    model = Net(experts)
    for parameter in (model.head.weight, model.head.bias):
        dist.broadcast(parameter.data, 0)
    if data is not None:  # the same experts hold the same
        for layer in (model.first, model.second):
            for parameter in layer.parameters():
                dist.broadcast(parameter.data, dist.get_global_rank(data, 0), group=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole = 4 * sum(parameter.nbytes for parameter in model.parameters())
    block: Any = contextlib.nullcontext()
    if share is not None:
        block = dynoffload.offload(
            model, optimizer, budget=int(share * whole), pilot=None, config=CONFIG
        )
    with block as session:
        losses = [step_of(model, optimizer, rank, number, data) for number in range(4)]
        if session is not None:
            assert session.stats["bytes_in"].sum() > 0, "nothing was paged"
    return [torch.stack(losses), *(parameter.detach().clone() for parameter in model.parameters())]


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, data: Any
) -> Tensor:
    """Make a step on tokens of this rank and number; gradients of experts are summed in ``data``,
    the ranks that hold the same. Return its loss, and the norm before gradients are clipped."""
    drawn = torch.Generator().manual_seed(10 * number + rank)
    loss: Tensor = model(torch.randn(5 + 3 * rank + number, 32, generator=drawn))
    loss.backward()
    if not isinstance(model, DistributedDataParallel):
        for name, parameter in model.named_parameters():
            experts = name.split(".")[-1] in ("up", "down")
            if data is not None or not experts:
                summed = parameter.grad.clone()  # type: ignore[union-attr]
                dist.all_reduce(summed, group=data if experts else None)
                parameter.grad.copy_(summed)  # type: ignore[union-attr]
    norm = clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach(), norm])


def groups_of(rank: int, world: int, width: int) -> tuple[Any, Any]:
    """Return this rank's groups: of ranks that share experts, and that hold the same ones."""
    experts = data = None
    for ranks in (list(range(at, at + width)) for at in range(0, world, width)):
        group = dist.new_group(ranks)
        experts = group if rank in ranks else experts
    for ranks in (list(range(at, world, width)) for at in range(width)):
        group = dist.new_group(ranks)
        data = group if rank in ranks else data
    return experts, data


def compared(rank: int, world: int, width: int) -> dict[str, Any]:
    """Train plainly and in a block, with groups of ``width`` ranks that share experts."""
    experts, data = groups_of(rank, world, width) if width < world else (None, None)
    plain = trained(rank, experts, data, None)
    paged = trained(rank, experts, data, 0.7)
    same = all(torch.equal(one, two) for one, two in zip(plain, paged, strict=True))
    return {"same": same, "count": len(plain), "head": paged[-2], "up": paged[2]}


def chosen(rank: int, world: int) -> dict[str, Any]:
    """Compare steps in a block, cut as was chosen before it, with steps by fixed parts and none; a
    batch that has no choice yet is refused there."""
    torch.manual_seed(0)
    layer = ExpertParallel(32, 64, 4, 2, timeout=60)
    given = torch.randn(20 + 3 * rank, 32, requires_grad=True)

    def step() -> list[Tensor]:
        out = layer(given).hidden
        out.square().sum().backward()
        assert given.grad is not None
        assert layer.router.grad is not None
        assert layer.up.grad is not None
        found = [out.detach(), given.grad, layer.router.grad.clone(), layer.up.grad.clone()]
        given.grad = None
        return found

    *wanted, experts = step()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer.zero_grad()
    whole = 2 * sum(parameter.nbytes for parameter in layer.parameters())  # without state
    layer.set_pipeline("auto", "auto")
    step()
    optimizer.zero_grad()
    same, said = True, ""
    block = dynoffload.offload(layer, optimizer, budget=int(0.7 * whole), pilot=None, config=CONFIG)
    with block as session:
        for _ in range(4):
            *found, gradient = step()
            optimizer.step()
            optimizer.zero_grad()
            same &= all(torch.equal(one, known) for one, known in zip(found, wanted, strict=True))
            same &= torch.allclose(gradient, experts, rtol=1e-4, atol=1e-5)
        assert session is not None
        assert session.stats["bytes_in"].sum() > 0, "nothing was paged"
        try:
            layer(torch.randn(100, 32, requires_grad=True))
        except ConfigError as error:
            said = str(error)
    return {"same": same, "taken": [layer.choice.parts, layer.choice.strategy.value], "said": said}


def replicated(rank: int, world: int) -> dict[str, Any]:
    """Compare a step beside `DistributedDataParallel` with the layer of one process that has all
    experts and all tokens, whose loss is the mean of the ranks'; and refuse experts as replicas."""
    torch.manual_seed(0)
    wrong = DistributedDataParallel(ExpertParallel(8, 16, 4, 2, timeout=30, name="wrong"))
    said = ""
    try:
        wrong(torch.randn(3, 8))
    except ConfigError as error:
        said = str(error)
    whole = MoE(8, 16, 4, 2, shared=8, dtype=torch.float64)
    for parameter in whole.parameters():
        dist.broadcast(parameter.data, 0)
    layer = ExpertParallel(8, 16, 4, 2, shared=8, dtype=torch.float64, timeout=30)
    layer.load_whole(whole.state_dict())
    names = keep_apart(layer)
    model = DistributedDataParallel(layer)
    tokens = [torch.randn(3 + 2 * other, 8, dtype=torch.float64) for other in range(world)]
    for one in tokens:
        dist.broadcast(one, 0)
    model(tokens[rank]).hidden.square().mean().backward()
    torch.stack([whole(one).hidden.square().mean() for one in tokens]).mean().backward()
    for name, one in layer.named_parameters():
        if name in names:
            one.grad /= world  # type: ignore[operator]
    before, norms = whole.router.grad.clone(), []  # type: ignore[union-attr]
    for order in (2.0, 3.0, math.inf):  # each clips what the one before has left
        for most in (1e-3, 1e9):
            wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), most, order)
            norms.append(float(clip_grad_norm_(model, most, order) / wanted) - 1)
    assert not torch.equal(whole.router.grad, before), "nothing was clipped"  # type: ignore[arg-type]
    apart = {}
    for (name, one), other in zip(layer.named_parameters(), whole.parameters(), strict=True):
        wanted = layer.own(other.grad) if name in names else other.grad  # type: ignore[arg-type]
        apart[name] = float((one.grad - wanted).abs().max())  # type: ignore[operator]
    if rank:
        layer.up.grad[0] = math.nan  # type: ignore[index]
    broken = []
    for order in (2.0, math.inf):
        try:
            clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True)
        except RuntimeError as error:
            broken.append(str(error))
    layer.balance(layer(tokens[rank]).routing)
    whole.balance(whole(torch.cat(tokens)).routing)
    moved = bool(whole.choice_bias.any()) and torch.equal(layer.choice_bias, whole.choice_bias)
    found = {"said": said, "names": names, "apart": apart, "norms": norms, "broken": broken}
    return {**found, "moved": moved}


UNLIKE: list[tuple[list[Any], list[Any]]] = [
    ([2, "S1"], [4, "S1"]),
    ([2, "S1"], [2, "none"]),
    ([2, "S1"], ["auto", "S1"]),
    (["auto", "S1"], ["auto", "S2"]),
    (["auto", "auto", 2**20], ["auto", "auto", 2**30]),
    (["auto", "auto"], ["auto", "auto", 2**30]),
]
"""How two ranks cut batches, that do so otherwise: parts, strategy and memory."""


def unlike(rank: int, world: int) -> list[str]:
    """Return what layers say whose ranks cut batches otherwise."""
    found = []
    for case in UNLIKE:
        parts, strategy, *memory = case[rank]
        limit = memory[0] if memory else None
        options: dict[str, Any] = {"parts": parts, "strategy": strategy, "memory": limit}
        layer = ExpertParallel(8, 16, 4, timeout=30, name="a.moe", **options)
        try:
            layer(torch.randn(6, 8))
        except ConfigError as error:
            found.append(str(error))
    return found


def wrapped(rank: int, world: int) -> dict[str, str]:
    """Return what layers say in wrappers that would mix experts, or wait for each other."""
    torch.manual_seed(0)

    def said(model: nn.Module) -> str:
        try:
            out = model(torch.randn(6, 8))
            getattr(out, "hidden", out).sum().backward()
        except ConfigError as error:
            return str(error)
        return ""

    def made(group: Any = None) -> nn.Module:
        layer = ExpertParallel(8, 16, 4, group=group, timeout=30)
        keep_apart(layer)
        return DistributedDataParallel(layer, find_unused_parameters=True)

    found = {"ddp": said(made()), "own": said(made(dist.new_group()))}
    layers = [ExpertParallel(8, 16, 4, timeout=30) for _ in range(2)]
    for layer, name in zip(layers, ("fsdp", "left"), strict=True):
        left = {layer.up, layer.down} if name == "left" else None
        experts = layer.up.detach().clone()
        model = fully_shard(
            nn.Sequential(layer), mesh=init_device_mesh("cpu", (world,)), ignored_params=left
        )
        found[name] = said(model)
        if left:
            assert torch.equal(layer.up, experts)
    return found


def dies(rank: int, world: int) -> str:
    """Return the error of rank 0, whose peer ends in the midst of a block."""
    model = Net(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = {**CONFIG, "rank_timeout": 20}
    try:
        with dynoffload.offload(model, optimizer, budget="1GiB", pilot=None, config=config):
            for step in range(30):
                if rank == 1 and step == 3:
                    os._exit(9)
                model(torch.randn(5 + rank, 32)).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.3)  # lines of where ranks are are told once a second
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
