"""Routing probes of mixtures with fused experts, found by structure: which experts come next.

A router is the one module beside a fused layer, without modules inside, that owns a matrix with a
row for each expert; what it returns holds the indices that the layer is called with. It is asked
early, on the hidden state at hand: as the experts of the mixture before begin, or, for the first of
a stack of layers, as its own layer begins, through the layer's last norm. It runs as a copy without
hooks, on copies of its buffers, so that nothing of the network changes.

[Note: calibration]  Tokens move while attention and experts add to them, much in the same way for
all. So for each router a ridge regression over the latest calls maps what the router says early to
which experts each token went to. It is linear in the router's choice and in random
rectified combinations of its logits, which tell more than the logits themselves: `_FEATURES` for
each expert, so that a calibration is small beside experts, and `_MOST` at most. A chance is that
of any token to choose the expert, as if they chose independently. Few tokens wait until there are
`_FOLDED`, as entering them costs a pass over all products. Nothing is asked or learned within a
transform of `torch.func`, whose tensors must not outlive it.

[Note: all]  Where the last call hit nearly all experts, all are expected, and nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.profiler.experts import experts_hit, indices_of, slices_in, unit_path

ALL = 0.95
"""Share of the experts that the last call must have hit for all to be expected."""
MAX_TOKENS = 256
"""The most tokens of a call that a calibration learns from."""
_KEPT = 0.995  # weight of earlier calls at each call
_EVERY = 8  # first calls, each of which is followed by a solution, and later folds between two
_FOLDED = 128  # tokens that are entered at a time, after the first calls
_FEATURES, _MOST = 4, 256  # random combinations of logits, for each expert and in all
_RIDGE = 1.0


class _Calibration:
    """Maps a router's early answers to chances; see [Note: calibration]."""

    def __init__(self) -> None:
        self.asked: Tensor | None = None  # first answers of the latest call, [tokens, features]
        self._tokens = 0  # of that call
        self._waiting: list[Tensor] = []  # of each call, answers and outcomes
        self._products: Tensor | None = None  # of features with features and with outcomes
        self._weights: Tensor | None = None  # [features, experts]
        self._calls = self._solved = 0  # calls learned from: all, and those in the weights

    def chances(self, answers: Tensor) -> Tensor | None:
        """Return the chance that each token chooses each expert; None before it has learned."""
        self.asked, self._tokens = answers[:MAX_TOKENS].clone(), len(answers)
        return None if self._weights is None else _product(answers, self._weights).clamp(0, 1)

    def learn(self, outcomes: Tensor) -> None:
        """Learn which experts the tokens of the latest answers went to, ``[tokens, experts]``."""
        answers, self.asked = self.asked, None
        if answers is None or self._tokens != len(outcomes):
            return
        if not answers.isfinite().all():  # as after an overflow that a gradient scaler undoes
            return
        self._waiting.append(torch.cat((answers, outcomes[:MAX_TOKENS]), 1))
        self._calls += 1
        if self._calls <= _EVERY or sum(map(len, self._waiting)) >= _FOLDED:
            self._fold(answers.shape[1])

    def _fold(self, features: int) -> None:
        """Enter what waits into the products; solve for the weights if much is new."""
        rows, forgotten = torch.cat(self._waiting), _KEPT ** len(self._waiting)
        self._waiting.clear()
        new = _product(rows[:, :features].T, rows)
        self._products = new if self._products is None else forgotten * self._products + new
        if self._calls <= _EVERY or self._calls - self._solved >= _EVERY:
            squares = self._products[:, :features] + _RIDGE * torch.eye(features).to(rows)
            with torch.autocast("cpu", enabled=False):
                self._weights = torch.linalg.solve(squares, self._products[:, features:])
            self._solved = self._calls


def _mixed(logits: Tensor, mixing: Tensor) -> Tensor:
    """Return rectified combinations of logits, ``[tokens, features]``."""
    return _product(F.layer_norm(logits, logits.shape[1:]), mixing).relu()


def _product(left: Tensor, right: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return left @ right


def _mixing(experts: int) -> Tensor:
    """Return the weights of random combinations, ``[experts, features]``, always the same."""
    drawn = torch.randn(
        experts,
        min(_MOST, _FEATURES * experts),
        generator=torch.Generator().manual_seed(experts),
        device="cpu",
        dtype=torch.float32,
    )
    return drawn / math.sqrt(experts)


class _Mixture:
    """One fused layer with its router, and the norm before it, if one was found."""

    def __init__(self, site: str, layer: nn.Module, model: nn.Module) -> None:
        self.site, self.count = site, next(iter(slices_in(layer).values()))
        self.blocks = tuple(unit_path(site, number) for number in range(self.count))
        self.path = site.rpartition(".")[0]
        self.decoder = self.path.rpartition(".")[0]
        self.stack = self.decoder.rpartition(".")[0]
        self._layer = layer
        self._calibration = _Calibration()
        self._hit = 0.0  # share of the experts that the last call hit
        self._router = self._norm = ("", nn.Module())
        routers = [
            (_below(self.path, name), module)
            for name, module in model.get_submodule(self.path).named_children()
            if any(p.dim() == 2 and len(p) == self.count for p in _own(module))
            and module is not layer
            and type(module).__module__.startswith("transformers.")  # known to have no effects
            and not any(True for _ in module.children())
        ]
        self.found = len(routers) == 1
        if not self.found:
            return
        self._router, self._mixing = routers[0], _mixing(self.count)
        width = next(p.shape[1] for p in _own(routers[0][1]) if p.dim() == 2)
        for name, module in model.get_submodule(self.decoder).named_children():
            own = _own(module)
            if own and all(p.shape == (width,) for p in own) and len([*module.modules()]) == 1:
                self._norm = (_below(self.decoder, name), module)

    def probes(self, before: _Mixture | None) -> list[tuple[str, tuple[str, ...], Any]]:
        """Return where it is asked, with the modules that are read and the function to call."""
        router, (name, norm) = self._router[0], self._norm
        found: list[tuple[str, tuple[str, ...], Any]] = [(self.site, (), self._learn)]
        if before is not None and before.stack == self.stack:
            found.append((before.site, (router,), partial(self._ask, None)))
        elif name and self.path:
            found.append((self.decoder, (name, router), partial(self._ask, norm)))
        return found

    def _ask(self, norm: nn.Module | None, *args: Any) -> Tensor | None:
        if self._hit >= ALL:  # see [Note: all]
            return torch.ones(self.count)
        if _transformed() or not args or not isinstance(args[0], Tensor):
            return None
        if not args[0].is_floating_point():
            return None
        x = args[0] if norm is None else _run(norm, args[0])
        answers = self._answers(x.reshape(-1, x.shape[-1]))
        if answers is None:
            return None
        chances = self._calibration.chances(answers)
        chances = answers[:, : self.count] if chances is None else chances
        return 1 - (1 - chances).prod(0)

    def _answers(self, x: Tensor) -> Tensor | None:
        """Return the router's choice of each token, ones and zeros, a one, and combinations of its
        logits, if it returns any, float32; None if it returns no indices."""
        result = _run(self._router[1], x)
        parts = [one for one in _tensors(result) if one.dim() == 2 and len(one) == len(x)]
        chosen = [one for one in parts if not one.is_floating_point()]
        logits = [one for one in parts if one.is_floating_point() and one.shape[1] == self.count]
        if not chosen:
            return None
        rows = self._outcomes(chosen[0])
        answers = [rows, torch.ones_like(rows[:, :1])]
        answers += [_mixed(one.cpu().float(), self._mixing) for one in logits[:1]]
        return torch.cat(answers, 1)

    def _outcomes(self, indices: Tensor) -> Tensor:
        indices = indices.cpu().long()
        rows = torch.zeros(len(indices), self.count + 1, device="cpu", dtype=torch.float32)
        return rows.scatter_(1, indices.clamp(0, self.count), 1.0)[:, : self.count]

    def _learn(self, *args: Any) -> None:
        """Learn from a call of the fused layer; it says what it is about to do by itself."""
        indices, hit = indices_of(self._layer, args, {}), experts_hit(self._layer, args, {})
        if indices is None or hit is None or _transformed():
            return
        self._hit = len(hit) / self.count
        if self._hit < ALL:
            self._calibration.learn(self._outcomes(indices))
        self._calibration.asked = None


def mixtures_in(model: nn.Module) -> list[_Mixture]:
    """Return the mixtures of a model whose routers are found, in order."""
    made = (_Mixture(p, m, model) for p, m in model.named_modules() if p and slices_in(m))
    return [one for one in made if one.found]


def _transformed() -> bool:
    """Return whether a transform of `torch.func` is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _run(module: nn.Module, x: Tensor) -> Any:
    """Return the module's result without its hooks, and without effect on its attributes."""
    if not all(type(p) is nn.Parameter and not p.is_meta for p in _own(module)):
        raise ValueError("its weights are in no ordinary memory")
    copied: Any = object.__new__(type(module))
    buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    copied.__dict__.update(module.__dict__, _buffers=buffers)
    return type(module).forward(copied, x)


def _tensors(result: Any) -> Sequence[Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [one for one in parts if isinstance(one, Tensor)]
