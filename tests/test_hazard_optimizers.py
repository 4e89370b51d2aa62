"""Hazard: how each optimizer makes its updates, when they are split by parameter and put off.

The graph: a few linear layers, with every optimizer of `torch.optim` in each of its variants
(for-loop, foreach, fused, capturable, differentiable, amsgrad, maximize, centered, nesterov, and
rates that are tensors), over an odd-sized and a small parameter too, and for Muon, which takes
matrices only, wide and tall ones without biases; transformers' Adafactor, whose state is factored;
the user's own optimizers; those that are refused; and state that is reset, put away and copied.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    each_backend,
    each_backend_in_time,
    each_paged,
    guarded,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import dynoffload
from dynoffload.errors import ConfigError

REFUSED = {
    "LBFGS": "updates all parameters together, with one state for the group",
    "SparseAdam": "takes sparse gradients, which are not paged",
}
EXTRAS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "AdamW": [{"amsgrad": True}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True}, {"momentum": 0.9, "centered": True}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "ASGD": [{"t0": 2.0, "weight_decay": 0.01}],
    "Rprop": [{"etas": (0.4, 1.3)}],
    "Muon": [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": "tensor"},
        {"dtype": torch.bfloat16, "nesterov": False},
    ],
}


def _stock() -> list[type[Optimizer]]:
    return [
        kind
        for name, kind in sorted(vars(torch.optim).items())
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and name != "Optimizer"
    ]


def _variants() -> list[Any]:
    found = []
    for kind in _stock():
        if kind.__name__ in REFUSED:
            continue
        known = inspect.signature(kind).parameters
        options: list[dict[str, Any]] = [{}, *EXTRAS.get(kind.__name__, [])]
        options += [{name: True} for name in ("foreach", "fused", "maximize") if name in known]
        options += [{"foreach": False}] if "foreach" in known else []
        if kind.__name__ in ("SGD", "Adam", "AdamW", "Adagrad"):
            options.append({"lr": "tensor", "foreach": False})
            options += [{**extra, "fused": True} for extra in EXTRAS[kind.__name__][:1]]
        found += [
            pytest.param(kind, option, id=f"{kind.__name__}-{option or 'default'}")
            for option in options
        ]
    return found


class Uneven(nn.Module):
    """Layers of odd sizes: 67 × 67 and 67 × 5, and a scale of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(67, 67) for _ in range(3))
        self.head = nn.Linear(67, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.scale)
        return self.head(x)


class Matrices(nn.Module):
    """Layers without biases, wide and tall, of odd and of even sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(67, 67), (67, 128), (128, 128), (128, 67), (67, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def uneven_loss(model: nn.Module, step: int) -> Tensor:
    """Return a loss of the networks above."""
    return loss_of(model, step, width=67, classes=5)


@pytest.mark.parametrize(("kind", "options"), _variants())
@each_backend_in_time
def test_every_optimizer_of_torch(
    backend: str, kind: type[Optimizer], options: dict[str, Any]
) -> None:
    options = dict(options)
    options["lr"] = torch.tensor(1e-2) if options.get("lr") == "tensor" else 1e-2
    dtype = options.pop("dtype", torch.float32)

    def network() -> nn.Module:
        return (Matrices() if kind is Muon else Uneven()).to(dtype)

    def make(parameters: Any) -> Optimizer:  # each side has its rate
        return kind(parameters, **copy.deepcopy(options))

    hazard(backend, trained(network, loss=uneven_loss, optimizer=make, steps=5))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_split_is_refused(name: str) -> None:
    """Before anything is touched, with the optimizer's name and what to use."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    address = model.weight.data_ptr()
    with pytest.raises(ConfigError, match=f"{name} {REFUSED[name]}: use an optimizer with dense"):
        with dynoffload.offload(model, optimizer, budget="10MB"):
            raise AssertionError("it was accepted")
    assert model.weight.data_ptr() == address


def test_no_optimizer_of_torch_is_forgotten() -> None:
    """What a new release of torch adds must be looked at, and be here or in the refusals."""
    known = {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam"),
        *("Muon", "RAdam", "RMSprop", "Rprop", "SGD"),
        *REFUSED,
    }
    assert {kind.__name__ for kind in _stock()} == known


@stepwise(
    each_backend,
    optimizer=lambda p: AdamW(p, lr=1e-2, capturable=True, foreach=False),
    steps=1,
    aside=False,
)
def test_capturable(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Capturable optimizers want an accelerator: the error is torch's, at the step."""
    loss_of(model, 0).backward()
    side.fails("step", optimizer.step)
    optimizer.param_groups[0]["capturable"] = False
    optimizer.state.clear()
    side.step(loss_of(model, 1), optimizer)


@stepwise(
    each_backend,
    optimizer=lambda p: AdamW(p, lr=1e-2, differentiable=True),
    steps=1,
    moves=False,
    aside=False,
)
def test_differentiable(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Torch refuses to write leaf parameters with a graph: the error is its own. It has counted
    the step of one by then, so the user loads what was there before."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss_of(model, 0).backward()
    side.fails("step", optimizer.step)
    optimizer.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


@each_backend
@pytest.mark.parametrize("relative", [True, False])
def test_adafactor_of_transformers(backend: str, relative: bool) -> None:
    """Factored moments, and a rate that comes from the parameter's own size."""
    from transformers.optimization import Adafactor

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        rate = None if relative else 1e-2
        own = {"scale_parameter": relative, "relative_step": relative, "warmup_init": relative}
        return Adafactor(parameters, lr=rate, beta1=0.9, **own)

    hazard(backend, trained(Uneven, loss=uneven_loss, optimizer=make, steps=5))


class Foreach(Optimizer):
    """One of the user's: whole lists at a time, several states to a parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        kept: dict[str, list[Tensor]] = {}
        for key in ("trace", "last", "mean"):
            for p in parameters:
                self.state[p].setdefault(key, torch.zeros_like(p))
            kept[key] = [self.state[p][key] for p in parameters]
        torch._foreach_lerp_(kept["trace"], gradients, 0.1)
        torch._foreach_addcmul_(kept["mean"], kept["trace"], kept["last"], 0.1)
        torch._foreach_copy_(kept["last"], gradients)
        torch._foreach_add_(parameters, kept["trace"], alpha=-group["lr"])
        return loss


class Late(AdamW):
    """A subclass outside of torch's modules: its step runs whole."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] *= 0.9
        return super().step(closure)


@each_backend
@pytest.mark.parametrize("kind", [Foreach, Late])
def test_an_optimizer_of_the_users(backend: str, kind: type[Optimizer]) -> None:
    make = partial(kind, lr=1e-2)
    hazard(backend, trained(Uneven, loss=uneven_loss, optimizer=make, steps=5, states=1))


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def _moved_little(paged: Side) -> None:
    """Operands that evict each other are read a thousand times; at rest a step reads some."""
    for session, budget in paged.sessions:
        assert all(row.bytes_in < 50 * budget for row in session.log.steps)


@each_backend
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
def test_operands_of_a_whole_step_stay_together(backend: str, closure: bool) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        def evaluated() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            return loss

        side.see("loss", optimizer.step(evaluated) if closure else evaluated())
        if not closure:
            optimizer.step()

    program = trained(_layers, each, optimizer=Foreach, steps=3, states=1, share=0.4)
    _moved_little(hazard(backend, program, aside=False))


@each_backend
def test_operands_between_backward_and_step_stay_together(backend: str) -> None:
    """Averages of weights, which no forward uses, so that no plan holds them."""

    def averaging() -> nn.Module:
        model = nn.ModuleList(_layers() for _ in range(3))
        model.forward = model[0].forward
        model[1:].requires_grad_(False)
        return model

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        weights, first, second = (list(one.parameters()) for one in model)
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        with torch.no_grad():
            torch._foreach_lerp_(first, second, 0.1)
            torch._foreach_addcmul_(second, first, weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        side.see("loss", loss)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD([p for p in parameters if p.requires_grad], lr=1e-2)

    program = trained(averaging, each, optimizer=make, steps=3, states=0, share=0.26)
    _moved_little(hazard(backend, program, aside=False))


@each_backend
def test_a_step_of_the_instance(backend: str) -> None:
    """``optimizer.step`` wrapped by an attribute of the instance, as schedulers do."""

    def program(side: Side) -> None:
        calls = []

        def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
            optimizer = SGD(parameters, lr=1e-2, momentum=0.9)
            plain = optimizer.step

            def counted(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return plain(*args, **kwargs)

            optimizer.step = counted  # type: ignore[method-assign]
            return optimizer

        trained(optimizer=make)(side)
        side.see("calls", len(calls))

    hazard(backend, program)


@stepwise(guarded)
def test_a_closure_that_runs_the_model_twice(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """As line searches do by hand: forward and backward inside ``step()``."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step + 20)
        loss = loss_of(model, step)
        loss.backward()
        return loss

    side.see("loss", optimizer.step(closure))


@each_backend
def test_state_in_a_buffer_of_the_users(backend: str) -> None:
    """It stays where it is: the buffer shows every update."""

    def program(side: Side) -> None:
        model = Mlp()
        weights = [layer.weight for layer in model.layers]
        optimizer = AdamW(model.parameters(), lr=1e-2)
        side.step(loss_of(model, 0), optimizer)
        flat = torch.cat([optimizer.state[w]["exp_avg"].flatten() for w in weights])
        for number, part in enumerate(flat.split(64 * 64)):
            optimizer.state[weights[number]]["exp_avg"] = part.view(64, 64)
        with side.offload(model, optimizer):
            for step in range(1, 4):
                side.step(loss_of(model, step), optimizer)
                side.see("buffer", flat)
            flat.zero_()
            side.step(loss_of(model, 4), optimizer)

    hazard(backend, program, budgeted=False)


def _assign(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _set_state(optimizer: Optimizer) -> None:
    optimizer.__setstate__({"state": defaultdict(dict)})


def _set_entries(optimizer: Optimizer) -> None:
    for parameter in _of(optimizer):
        optimizer.state[parameter] = {}


def _merge(optimizer: Optimizer) -> None:
    optimizer.state |= {parameter: {} for parameter in _of(optimizer)}


def _of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@each_paged
@pytest.mark.parametrize(
    "reset",
    [_assign, _set_state, _set_entries, _merge],
    ids=lambda reset: reset.__name__,
)
def test_state_that_is_reset(backend: str, reset: Callable[[Optimizer], None]) -> None:
    """After the first step, whose state is still to come where its updates wait; and after
    another."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        side.step(loss_of(model, step), optimizer)
        if step in (0, 2):
            reset(optimizer)

    hazard(backend, trained(partial(Mlp, depth=2), each, share=0.5))


@guarded
@pytest.mark.parametrize("before", [False, True], ids=["of the block", "of before the block"])
def test_state_that_is_put_away_and_back(backend: str, before: bool) -> None:
    """What waited when it was put away is there when it comes back."""

    def program(side: Side) -> None:
        model = Mlp(depth=2)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        kept = optimizer.state
        with side.offload(model, optimizer, share=0.5):
            for step in range(4):
                side.step(loss_of(model, step), optimizer)
                if step == 0:
                    kept = kept if before else optimizer.state
                    optimizer.state = kept if before else defaultdict(dict)
                    optimizer.step()  # without a gradient
                if step == 2:
                    optimizer.state = kept

    hazard(backend, program)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "reversed": reversed,
    "ne": lambda state: (state != {}) and dict.keys(state),
    "repr": lambda state: repr(state) and dict.keys(state),
}


@guarded
@pytest.mark.parametrize("look", LOOKS)
def test_copies_of_the_state_and_looks_at_it(backend: str, look: str) -> None:
    """Whatever looks at the whole sees all entries; a copy is a plain mapping of the same ones."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        side.step(loss_of(model, step), optimizer)
        if step == 0:
            found = LOOKS[look](optimizer.state)
            side.see("entries", len(list(found)))
            if look == "copy":
                side.see("type", type(found) is defaultdict)
                side.see("values", [found[parameter] for parameter in model.parameters()])

    hazard(backend, trained(partial(Mlp, depth=2), each, share=0.5, steps=2))


@each_backend
@pytest.mark.parametrize("kind", [AdamW, SGD], ids=lambda kind: kind.__name__)
def test_the_order_of_the_entries(backend: str, kind: type[Optimizer]) -> None:
    """That of a whole step, also where a gradient comes late and an entry is made anew."""

    def program(side: Side) -> None:
        model = Mlp(depth=2)
        options = {"lr": 1e-2} if kind is AdamW else {"lr": 1e-2, "momentum": 0.9}
        optimizer = kind(model.parameters(), **options)
        parameters = list(model.parameters())
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        with side.offload(model, optimizer, share=0.5):
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step == 0:
                    parameters[1].grad = parameters[2].grad = None
                optimizer.step()
                if step in (0, 3):
                    side.see("entries", [numbers[parameter] for parameter in optimizer.state])
                if step == 1:
                    del optimizer.state[parameters[3]]
        side.see("entries", [numbers[parameter] for parameter in optimizer.state])
        side.see("saved", list(optimizer.state_dict()["state"]))

    hazard(backend, program)


class Wrapper(Optimizer):
    """An optimizer by type, as Opacus' is: torch's `__init__` has never run."""

    def __init__(self, inner: Optimizer) -> None:
        self.original = inner

    param_groups = property(lambda self: self.original.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return self.original.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original.state_dict()


class Ahead(Wrapper):
    """As timm's Lookahead: hooks that are never called, and slow weights of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    state: ClassVar[dict[Any, Any]] = {}  # type: ignore[assignment, misc]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter.data, 0.5)
            parameter.data.copy_(slow)
        return loss


class Slow(Optimizer):
    """A Lookahead that is an optimizer in full, and names the one it wraps as accelerate's does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                parameter.data.copy_(slow.lerp_(parameter.data, 0.5))
        return loss


@each_backend
@pytest.mark.parametrize("kind", [Wrapper, Ahead, Slow])
def test_an_optimizer_that_wraps_one_of_torch(
    backend: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What it wraps is paged; of what it keeps itself it is said that nobody counts it."""

    def program(side: Side) -> None:
        model = Mlp(depth=2)
        optimizer = kind(AdamW(model.parameters(), lr=1e-2))
        with side.offload(model, optimizer, share=0.5) as session:
            for step in range(4):
                side.step(loss_of(model, step), optimizer)
            assert session is None or len(session.log.steps) == 4

    hazard(backend, program, budgeted=kind is Wrapper)
    told = f"{kind.__name__} wraps the AdamW that is paged: what it keeps" in caplog.text
    assert told == (kind is not Wrapper)


class Headless(Optimizer):
    """Torch's `__init__` has never run, and there is nothing else in it."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state = [{"params": list(parameters)}], defaultdict(dict)
        self.defaults = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("it must be refused")


def test_an_optimizer_that_leaves_torchs_init_out_is_told_the_remedy() -> None:
    model = Mlp(depth=2)
    with pytest.raises(ConfigError, match=r"Headless leaves out the __init__ of torch\.optim\.Opt"):
        with dynoffload.offload(model, Headless(model.parameters()), budget="4MB"):
            pytest.fail("the block must not begin")
