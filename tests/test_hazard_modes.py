"""Hazard: modes of torch that change between a step and the update that it has put off.

The graph: linear layers, whose first updates make state: under one default dtype, device, number of
threads or mode at ``step()``, and another when the parameter is read. Updates made behind the
user's back must be as at ``step()``, and what is on where they are made must not see them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, Twin, assert_same, footprint_of
from fused_networks import paging_of
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend,
    each_backend_in_time,
    guarded,
    loss_of,
    stepwise,
)
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

import dynoffload
from dynoffload.errors import ConfigError, StepLostError
from dynoffload.runtime.updates.torch_context import depends_on_dtype


@contextmanager
def switched(switch: Callable[[Any], object], value: Any, back: Any) -> Iterator[None]:
    """Have a setting of torch be ``value``, and ``back`` afterwards."""
    switch(value)
    try:
        yield
    finally:
        switch(back)


def default_dtype(dtype: torch.dtype) -> Any:
    return switched(torch.set_default_dtype, dtype, torch.get_default_dtype())


def deterministic() -> Any:
    return switched(partial(torch.use_deterministic_algorithms, warn_only=True), True, False)


def threads(count: int) -> Any:
    return switched(torch.set_num_threads, count, torch.get_num_threads())


def without_mkldnn() -> Any:
    return switched(torch._C._set_mkldnn_enabled, False, torch._C._get_mkldnn_enabled())


def flushing() -> Any:
    return switched(torch.set_flush_denormal, True, False)


def read(side: Side, model: nn.Module) -> None:
    """Look at the weights: whatever waits is made now."""
    side.see("norm", model.layers[1].weight.detach().double().norm())


SCOPES: dict[str, Callable[[], Any]] = {
    "dtype": lambda: default_dtype(torch.float64),
    "device": lambda: switched(torch.set_default_device, "meta", None),
    "deterministic": deterministic,
    "threads": lambda: threads(2),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@compared(each_backend_in_time)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("where", ["at the step", "at the look", "at both"])
def test_a_mode_at_the_step_or_at_the_look(side: Side, scope: str, where: str) -> None:
    with side.block(lambda: Mlp(depth=3)) as (model, optimizer):
        for step in range(4):
            changed = where != "at the look" and scope not in ("inference", "device")
            within = SCOPES[scope]() if changed else None
            side.step(loss_of(model, step), optimizer, within=within)
            if where != "at the step":
                with SCOPES[scope]():
                    model.layers[1].weight.detach().sum()
            read(side, model)
        side.see("steps", [s["step"].dtype for s in optimizer.state.values()])


OF_PRODUCTS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "mkldnn": without_mkldnn,
}


class Matrices(nn.Module):
    """Layers of odd sizes without biases, wide and tall."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(64, 67), (67, 67), (67, 130), (130, 67)]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)
        self.head = nn.Linear(67, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@compared(each_backend_in_time)
@pytest.mark.parametrize("kind", [Adafactor, Muon])
@pytest.mark.parametrize("scope", OF_PRODUCTS)
@pytest.mark.parametrize("where", ["at the step", "at the look"])
def test_a_mode_that_norms_and_products_follow(
    side: Side, where: str, scope: str, kind: type[Optimizer]
) -> None:
    """Adafactor takes norms and Muon multiplies matrices, which autocast casts and oneDNN does in
    its own way. The looks are at one weight only; the others wait for the next forward."""
    model = Matrices()
    optimizer = kind(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, states=1) as session:
        for step in range(5):
            within = OF_PRODUCTS[scope]() if where == "at the step" else None
            side.step(loss_of(model, step), optimizer, within=within)
            if where == "at the look":
                if session is not None and scope == "mkldnn":
                    session.flush()
                with OF_PRODUCTS[scope]():
                    read(side, model)


@guarded
@pytest.mark.parametrize("kind", [Adafactor, Muon])
def test_products_after_onednn_was_switched_are_refused(
    backend: str, kind: type[Optimizer]
) -> None:
    """The guard's thread does not switch it, as other threads may be at work."""
    model = Matrices()
    optimizer = kind(model.parameters(), lr=1e-2)
    config = {"backend": backend, "step_aside": False, **SMALL_PAGES}
    budget = footprint_of(model, 1) // 2
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=config):
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        with without_mkldnn():
            model.layers[1].weight.detach().norm()
        with pytest.raises(StepLostError) as caught:
            loss_of(model, 2)
        assert isinstance(caught.value.__cause__, ConfigError)
        assert "call session.flush() before" in str(caught.value.__cause__)


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "threads": (lambda: threads(3), lambda: in_a_thread(torch.get_num_threads)),
    "mkldnn": (without_mkldnn, torch._C._get_mkldnn_enabled),
    "compiling": (
        torch.compiler._compile_session_context,
        lambda: bool(torch.compiler.is_compiling()),
    ),
}


@guarded
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ends", ["after it", "before it"])
def test_the_guard_leaves_settings_of_the_process_alone(
    backend: str, setting: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads a weight, so the guard makes its update while this one goes on, which has
    changed a setting since the step. Nothing of the update is seen here, then or later."""
    scope, value = SETTINGS[setting]
    twin = Twin(Mlp(depth=3), lambda p: AdamW(p, lr=1e-2))
    begun, go_on = threading.Event(), threading.Event()
    config = {"backend": backend, "step_aside": False, **SMALL_PAGES}
    with twin.paged(footprint_of(twin.model) // 2, config=config) as session:
        twin.train(loss_of, range(3))
        updates = paging_of(session).updates
        assert updates is not None
        step_of = updates.pending.step

        def slow(optimizer: Any) -> None:
            if threading.current_thread().name == "dynoffload-guard":
                begun.set()
                assert go_on.wait(100)
            step_of(optimizer)

        monkeypatch.setattr(updates.pending, "step", slow)
        before = value()
        watcher = threading.Thread(target=lambda: twin.model.layers[1].weight.norm())
        try:
            with scope():
                changed = value()
                assert changed != before
                watcher.start()
                assert begun.wait(100)
                assert value() == changed
                if ends == "after it":
                    go_on.set()
                    watcher.join(100)
                    assert value() == changed
            assert value() == before
        finally:
            go_on.set()
        watcher.join(100)
        assert not watcher.is_alive()
        assert value() == before
    twin.assert_same()


class Sums(nn.Module):
    """Its weights are zeros at first, and have gradients that do not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return sum((layer(x).sum() for layer in self.layers), torch.zeros(()))


@compared(each_backend)
@pytest.mark.parametrize("where", ["at the step", "at the look", "at both"])
def test_denormals_flushed_at_the_step_or_at_the_look(side: Side, where: str) -> None:
    """All that an update changes is a denormal number, or nothing where those are flushed."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormal numbers")
    model = Sums()
    optimizer = SGD(model.parameters(), lr=1e-39)
    with side.offload(model, optimizer, states=0):
        for step in range(3):
            loss = model(batch(step)[0])
            side.step(loss, optimizer, within=None if where == "at the look" else flushing())
            with nullcontext() if where == "at the step" else flushing():
                model(batch(50)[0])
    changed = any(layer.weight.detach().ne(0).any() for layer in model.layers)
    assert changed == (where == "at the look")


class Doubling(TorchFunctionMode):
    """Changes results: products of tensors made under it are twice as large."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.zeros_like else result


@stepwise(each_backend, lambda: Mlp(depth=3))
def test_a_mode_that_changes_operators(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """First at the step, then around forward."""
    side.step(loss_of(model, step), optimizer, within=Doubling() if step == 1 else None)
    with Doubling():
        side.see("score", loss_of(model, 50).detach())


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and kind not in (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_updates_depend_on(kind: type[Optimizer], foreach: bool) -> None:
    """Deterministic algorithms change no bit, and the default dtype none but of what it is said
    to: so whoever makes an update later may leave both as they are."""

    def state(scope: Callable[[], Any], begin: int) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(33, 17))
        options = {} if kind is Muon else {"foreach": foreach}
        optimizer = kind([parameter], lr=1e-2, **options)  # type: ignore[call-arg]
        for step in range(4):
            parameter.grad = torch.randn(33, 17)
            with scope() if step >= begin else nullcontext():
                optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    plain = state(nullcontext, 0)
    assert_same(state(deterministic, 0), plain, "deterministic")
    for dtype in (torch.float64, torch.bfloat16):
        optimizer = kind([nn.Parameter(torch.ones(2, 2))])
        if not depends_on_dtype(optimizer, first=False):
            begin = 1 if depends_on_dtype(optimizer, first=True) else 0
            assert_same(state(lambda of=dtype: default_dtype(of), begin), plain, str(dtype))  # type: ignore[misc]
