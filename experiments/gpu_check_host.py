"""The optimizer on the host, on this machine's accelerator, against its definition in plain torch.

What it is: cases of `dynoffload.experiments.gpu_check` for `dynoffload.HostOptimizer`: a network in
bfloat16 trained by it, and by the lines of plain PyTorch that its page says it is. What it is not:
sessions, which the other cases are of. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from dynoffload.experiments import zoo
from dynoffload.experiments.bits import first_difference
from dynoffload.experiments.gpu_check_cases import Verdict, deterministic
from dynoffload.experiments.zoo.building import moved

_LR, _CLIP, _STEPS = 1e-3, 0.5, 4


@dataclass(frozen=True)
class HostCase:
    """One way in which the optimizer works.

    Attributes:
        files: masters and moments are in a file.
        clips: gradients are clipped.
    """

    files: bool = False
    clips: bool = False

    def describe(self) -> str:
        """Return it in a few words."""
        ways = ["a file" if self.files else "memory", "clipped" if self.clips else ""]
        return f"HostOptimizer: moe; {', '.join(filter(None, ways))}"


def host_cases() -> list[HostCase]:
    """Return all cases."""
    return [HostCase(clips=True), HostCase(files=True)]


def train_host_case(
    case: HostCase, device: torch.device, spill_dir: str | None = None
) -> dict[str, Any]:
    """Train one case both ways and return ``verdict``, a value of `Verdict`, and ``why``."""
    with deterministic():
        expected, again = (_by_definition(case, device) for _ in range(2))
        difference = first_difference(again, expected, "plain")
        if difference:
            why = f"plain training differs from itself: {difference}"
            return {"verdict": Verdict.NOT_DETERMINISTIC.value, "why": why}
        difference = first_difference(_by_ours(case, device, spill_dir), expected, "trained")
    return {
        "verdict": (Verdict.FAILED if difference else Verdict.EXACT).value,
        "why": difference,
    }


def _network(device: torch.device) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = zoo.build("moe", "tiny").to(device, torch.bfloat16)
    return model, [moved(one.args, device) for one in islice(zoo.samples("moe", seed=0), _STEPS)]


def _losses(model: nn.Module, samples: list[Any]) -> Iterator[torch.Tensor]:
    for number, args in enumerate(samples):
        torch.manual_seed(number)
        yield model(*args).loss


def _found(model: nn.Module, losses: list[torch.Tensor]) -> dict[str, Any]:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {"losses": [one.detach().cpu() for one in losses], "parameters": parameters}


def _by_definition(case: HostCase, device: torch.device) -> dict[str, Any]:
    model, samples = _network(device)
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float().cpu()) for p in parameters]
    inner, losses = AdamW(masters, lr=_LR, fused=True), []
    for loss in _losses(model, samples):
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss)
        if case.clips:
            nn.utils.clip_grad_norm_(parameters, _CLIP, foreach=False)
        for master, p in zip(masters, parameters, strict=True):
            master.grad = None if p.grad is None else p.grad.cpu().float()
            p.grad = None
        inner.step()
        with torch.no_grad():
            for master, p in zip(masters, parameters, strict=True):
                if master.grad is not None:
                    p.copy_(master)
    return _found(model, losses)


def _by_ours(case: HostCase, device: torch.device, spill_dir: str | None) -> dict[str, Any]:
    import dynoffload

    model, samples = _network(device)
    optimizer = dynoffload.HostOptimizer(
        model.parameters(),
        AdamW,
        lr=_LR,
        tile_bytes="64KiB",  # several a step
        spill_dir=(spill_dir or "/var/tmp") if case.files else None,
    )
    losses = []
    try:
        for loss in _losses(model, samples):
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
            if case.clips:
                optimizer.clip_grad_norm_(_CLIP)
            optimizer.step()
        return _found(model, losses)
    finally:
        optimizer.close()
