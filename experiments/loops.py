"""Training loops with the options that real ones use.

`loops` combines optimizers, accumulation, clipping, autocast, checkpointing, frozen parts and half
precision, so that each meets many of the others. A loop runs unchanged inside and outside a block.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW foreach": {"lr": 1e-3, "foreach": True},
    "AdamW fused": {"lr": 1e-3, "fused": True},
    "AdamW amsgrad": {"lr": 1e-3, "amsgrad": True, "foreach": False},
    "Adam foreach": {"lr": 1e-3, "weight_decay": 0.01, "foreach": True},
    "SGD momentum": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    # With momentum it fails in torch itself if a parameter gets its first gradient late.
    "SGD fused": {"lr": 1e-2, "weight_decay": 0.01, "fused": True},
    "RMSprop centered": {"lr": 1e-3, "centered": True, "momentum": 0.5},
    "Adagrad plain": {"lr": 1e-2},
    "Adadelta plain": {"lr": 0.5},
    "Adamax plain": {"lr": 1e-3},
    "NAdam decoupled": {"lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.01},
    "RAdam plain": {"lr": 1e-3},
    "Rprop plain": {"lr": 1e-3},
    "ASGD plain": {"lr": 1e-2, "t0": 2},
    "Adafactor plain": {"lr": 1e-2},
    "transformers.Adafactor relative": {},
}
"""Class in `torch.optim` (or another named module) and variant -> its arguments."""

_ACCUMULATE = (1, 1, 2)
_CLIP = ("", "norm", "value", "")
_AUTOCAST = ("", "bfloat16", "", "", "float16")
_CHECKPOINTING = ("", "", "reentrant", "", "", "", "not reentrant")
_FROZEN = ("", "", "", "half", "", "embeddings", "", "", "", "", "")
_WEIGHTS = ("", "", "bfloat16", "", "", "", "bfloat16", "", "", "", "bfloat16", "", "")


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        optimizer: a key of `OPTIMIZERS`.
        accumulate: backward passes per step.
        clip: gradients by ``"norm"``, by ``"value"``, or "" for not at all.
        autocast: name of its dtype, or ""; float16 uses a GradScaler.
        checkpointing: ``"reentrant"``, ``"not reentrant"`` or "".
        frozen: ``"half"`` of the parameters, the ``"embeddings"`` or "".
        weights: name of the dtype of parameters and inputs, or "" for single precision; replaces
            autocast.
        steps: optimizer steps.
    """

    optimizer: str
    accumulate: int = 1
    clip: str = ""
    autocast: str = ""
    checkpointing: str = ""
    frozen: str = ""
    weights: str = ""
    steps: int = 5

    def describe(self) -> str:
        """Return a short description."""
        habits = [
            self.optimizer,
            f"accumulating {self.accumulate}" if self.accumulate > 1 else "",
            f"clipping by {self.clip}" if self.clip else "",
            self.autocast,
            f"checkpointing, {self.checkpointing}" if self.checkpointing else "",
            f"{self.frozen} frozen" if self.frozen else "",
            f"{self.weights} weights" if self.weights else "",
        ]
        return ", ".join(filter(None, habits))

    def without_checkpointing(self) -> Loop:
        """Return the loop without checkpointing, but with one more backward per step instead."""
        if not self.checkpointing:
            return self
        return replace(self, checkpointing="", accumulate=self.accumulate + 1)

    def prepare(self, model: Any) -> None:
        """Cast the weights, freeze parameters, and enable checkpointing."""
        if self.weights:
            model.to(getattr(torch, self.weights))
        if self.checkpointing:
            kwargs = {"use_reentrant": self.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            if kwargs["use_reentrant"] and _embeds(model):
                model.enable_input_require_grads()
        if self.frozen == "half":
            for parameter in list(model.parameters())[::2]:
                parameter.requires_grad_(False)
        elif self.frozen == "embeddings":
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.requires_grad_(False)

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs in the dtype of the weights."""
        if not self.weights:
            return inputs
        dtype = getattr(torch, self.weights)
        return {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in inputs.items()
        }

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the trainable parameters."""
        name = self.optimizer.split()[0]
        home = "torch.optim"
        if name.startswith("transformers."):
            home, name = "transformers.optimization", name.partition(".")[2]
        make = getattr(importlib.import_module(home), name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Optimizer = make(trained, **OPTIMIZERS[self.optimizer])
        return optimizer

    def train(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_of: Callable[[nn.Module, int], Tensor],
    ) -> Iterator[list[Tensor]]:
        """Train; after each step, before gradients are zeroed, yield its losses and, if it clips by
        norm, the gradient norm. Autocast is for the parameters' device."""
        dtype = getattr(torch, self.autocast) if self.autocast else None
        kind = next(model.parameters()).device.type
        scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16, init_scale=64.0)
        trained = [p for p in model.parameters() if p.requires_grad]
        samples = itertools.count()
        for _ in range(self.steps):
            losses = []
            for _ in range(self.accumulate):
                with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                    loss = loss_of(model, next(samples)) / self.accumulate
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach().clone())
            scaler.unscale_(optimizer)
            if self.clip == "norm":
                losses.append(nn.utils.clip_grad_norm_(trained, 0.5).detach().clone())
            elif self.clip == "value":
                nn.utils.clip_grad_value_(trained, 0.01)
            scaler.step(optimizer)
            scaler.update()
            yield losses
            optimizer.zero_grad()


def _embeds(model: Any) -> bool:
    """Return whether the inputs are embedded in one table, whose output can be made to require a
    gradient."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (AttributeError, NotImplementedError):
        return False


def loops(count: int, first: int = 0) -> list[Loop]:
    """Return ``count`` loops, starting at index ``first`` of an infinite sequence.

    The lengths of the option lists have no common divisor except those of optimizers and clipping,
    so all combinations occur.
    """

    def habit(row: tuple[Any, ...], number: int) -> Any:
        return row[number % len(row)]

    names = tuple(OPTIMIZERS)
    return [
        Loop(
            optimizer=habit(names, number),
            accumulate=habit(_ACCUMULATE, number),
            clip=habit(_CLIP, number + number // len(names)),
            autocast="" if habit(_WEIGHTS, number) else habit(_AUTOCAST, number),
            checkpointing=habit(_CHECKPOINTING, number),
            frozen=habit(_FROZEN, number),
            weights=habit(_WEIGHTS, number),
        )
        for number in range(first, first + count)
    ]
