"""Models on the meta device get their weights as the block begins, the same as plain ones get."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import SMALL_PAGES, Loop, assert_same, assert_same_training, needs_pager
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.runtime.session import Session

BUDGET = 256 * 1024
CONFIG = {**SMALL_PAGES, "step_aside": False}
BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]


class Net(nn.Module):
    """Large and small parameters, a tied one, a persistent and a computed buffer."""

    scale: Tensor
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("angles", torch.empty(32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the buffers their values; parameters belong to the parts."""
        with torch.no_grad():
            self.scale.fill_(0.5)
            self.angles.copy_(torch.arange(32, device=self.angles.device).float().cos())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.angles
        return self.head(self.hidden(x)) * self.scale


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a sample."""
    return nn.functional.cross_entropy(model(tokens), tokens)


SAMPLES = [torch.arange(i, i + 12) for i in range(12)]


def meta(make: Callable[[], nn.Module]) -> Any:
    """Return what ``make`` returns, without memory."""
    with torch.device("meta"):
        return make()


def plain() -> Net:
    """Return the model that plain PyTorch makes of seed 3, reset as `materialize` resets."""
    model = Net()
    torch.manual_seed(3)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


@contextlib.contextmanager
def paged(model: nn.Module, optimizer: Any) -> Iterator[Session]:
    """Page a model under the budget of these tests."""
    with dynoffload.offload(model, optimizer, budget=BUDGET, pilot=None, config=CONFIG) as session:
        yield session


@contextlib.contextmanager
def entered(backend: str, model: nn.Module) -> Iterator[None]:
    """Page a model on a backend, or on an emulated accelerator."""
    if backend == "accelerator":
        with (
            accelerated(),
            dynoffload.offload(model, budget="2MiB", pilot=None, config=CONFIG, device=DEVICE),
        ):
            yield
        return
    config = {**CONFIG, "backend": backend}
    with dynoffload.offload(model, budget="2MiB", pilot=None, config=config):
        yield


def given(model: nn.Module, init: Any = None) -> nn.Module:
    """Return ``model`` after a block that gave it its weights."""
    dynoffload.materialize(model, init)
    with paged(model, None):
        return model


def refused(model: nn.Module, said: str, kind: type[BaseException] = ConfigError) -> BaseException:
    """Assert that no block begins, and return the error, which says why."""
    with pytest.raises(kind, match=said) as caught, paged(model, None):
        pytest.fail("the block must not begin")
    return caught.value


def trains_as(model: nn.Module, reference: Callable[[], nn.Module]) -> None:
    """Train a model in a block that gives it its weights, and compare."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with paged(model, optimizer):
        Loop(steps=6).run(model, optimizer, SAMPLES, loss_of)
    its = reference()
    its_optimizer = AdamW(its.parameters(), lr=1e-2)
    Loop(steps=6).run(its, its_optimizer, SAMPLES, loss_of)
    assert_same_training(model, optimizer, its, its_optimizer)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("noted", [True, False])
def test_reset_parameters_gives_the_weights_of_a_plain_model(noted: bool) -> None:
    """Noted before the block, or by themselves."""
    model = meta(Net)
    parameters = list(model.parameters())
    torch.manual_seed(3)
    if noted:
        assert dynoffload.materialize(model) is model
        assert all(p.is_meta for p in model.parameters())
    trains_as(model, plain)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


def test_an_init_function_is_called_with_each_module_that_owns_something() -> None:
    """In the order of the modules; modules without parameters and buffers are left out."""
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            with torch.no_grad():
                tensor.fill_(0.01 * len(seen))

    model = meta(Net)
    dynoffload.materialize(model, init)

    def reference() -> Net:
        assert seen == ["Net", "Embedding", "Linear", "LayerNorm", "Linear", "Linear"]
        seen.clear()
        made = Net()
        for module in made.modules():
            if type(module).__name__ != "Sequential":
                init(module)
        return made

    trains_as(model, reference)


# Errors


def test_a_module_that_cannot_reset_itself_is_named() -> None:
    """The error says which, and both remedies; the model is as it was."""

    model = meta(lambda: nn.Sequential(nn.Linear(8, 8), Rooted()))
    del model[1].layer
    refused(model, r"module 1 \(Rooted\).*reset_parameters.*init=")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_are_not_given_in_the_block() -> None:
    model = meta(Net)
    with paged(model, None):
        with pytest.raises(ConfigError, match=r"inside the offload\(\) block of this Net.*before"):
            dynoffload.materialize(model)


class Angled(nn.Module):
    """A weight, and beside it a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))
        self.register_buffer("angles", torch.empty(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.angles


def give(module: nn.Module) -> None:
    """Initialise all that a module owns."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.fill_(0.25)


def test_a_function_makes_the_buffers_that_a_file_lacks(tmp_path: Path) -> None:
    """And what else it writes is the file's; without it, the remedy is named."""
    path = tmp_path / "weights.safetensors"
    save_file(
        {"0.weight": torch.eye(32), "1.bias": torch.ones(8), "1.weight": torch.ones(8, 32)}, path
    )
    model = meta(lambda: nn.Sequential(Angled(), nn.Linear(32, 8)))
    with pytest.raises(ConfigError, match=r"'0\.angles', a buffer .*: pass mat.* init=\(path, f"):
        dynoffload.materialize(model, path)
    dynoffload.materialize(model, (path, lambda module: None))
    refused(model, r"0\.angles got no value: init\(\) of its module")
    given(model, (path, give))
    assert torch.equal(model[0].weight, torch.eye(32))
    assert torch.equal(model[0].angles, torch.full((32,), 0.25))
    assert torch.equal(model[1].weight, torch.ones(8, 32))


@pytest.mark.parametrize(
    "init",
    [5, (), ("file", None), (give, "file"), ["file", give]],
    ids=["number", "nothing", "None beside", "turned round", "list"],
)
def test_an_init_that_says_nothing_is_refused_at_once(init: Any) -> None:
    """Before anything is touched: the block still gives the model its own weights."""
    model = meta(Net)
    accepted = r"says nothing .* None .*, a function .*, the path .*, or a tuple \(path, function\)"
    with pytest.raises(ConfigError, match=r"^init=.*" + accepted):
        dynoffload.materialize(model, init)
    torch.manual_seed(3)
    with paged(model, None):
        pass
    assert_same(dict(model.state_dict()), dict(plain().state_dict()), "weights")


@pytest.mark.parametrize("written", ["nothing", "weight", "data"])
def test_parameters_without_a_value_are_named(written: str) -> None:
    """A function that leaves them out; what writes by ``data`` has written."""

    def init(module: nn.Module) -> None:
        with torch.no_grad():
            for name, tensor in module.named_parameters(recurse=False):
                if written == "data":
                    tensor.data.fill_(0.5)
                elif written == name:
                    tensor.fill_(0.5)

    model = meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)))
    lacking = "0.weight, 0.bias, 1.weight, 1.bias" if written == "nothing" else "0.bias, 1.bias"
    dynoffload.materialize(model, init)
    if written != "data":
        refused(model, rf"^{lacking} got no value: init\(\) of its")
        assert all(parameter.is_meta for parameter in model.parameters())
        init = None
    given(model, init)
    assert not any(bool(p.isnan().any()) for p in model.parameters())


class Counted(Angled):
    """Its buffer is numpy's, and so has its values even on the meta device."""

    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.from_numpy(np.arange(32.0)), persistent=False)
        self.register_buffer("numbers", torch.from_numpy(np.arange(32)))

    def reset_parameters(self) -> None:
        """Write all, as a constructor would."""
        give(self)


@pytest.mark.parametrize("source", ["reset", "function", "file", "file and function"])
def test_a_buffer_that_has_its_values_keeps_them(source: str, tmp_path: Path) -> None:
    """Whoever initialises its module; a file alone has the last word on what it has."""
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.eye(32), "numbers": torch.arange(32) + 1}, path)
    model = meta(Counted)
    assert model.weight.is_meta
    assert not model.angles.is_meta
    sources = {"reset": None, "function": give, "file": path, "file and function": (path, give)}
    given(model, sources[source])
    from_file = source.startswith("file")
    assert torch.equal(model.angles, torch.arange(32.0, dtype=torch.float64))
    assert torch.equal(model.numbers, torch.arange(32) + int(from_file))
    assert torch.equal(model.weight, torch.eye(32) if from_file else torch.full((32, 32), 0.25))


class Rooted(nn.Module):
    """A root with a parameter of its own, that writes those of its layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize("then", ["nothing", "scales"])
def test_what_a_module_above_has_written_counts(then: str) -> None:
    """A layer of which nothing is left to write, or that changes in place what there is."""

    def init(module: nn.Module) -> None:
        if isinstance(module, Rooted):
            for parameter in module.parameters():
                parameter.fill_(2.0)
        elif then == "scales":
            for parameter in module.parameters():
                parameter.mul_(0.5)

    model = meta(Rooted)
    given(model, init)
    assert torch.equal(model.token, torch.full((4,), 2.0))
    for parameter in model.layer.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 1.0 if then == "scales" else 2.0))


def test_buffers_that_are_views_of_one_another() -> None:
    """On the meta device; and one that stands under two names stays one."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(8)
            self.register_buffer("table", table)
            self.register_buffer("head", table[:2])
            self.register_buffer("again", table)
            self.weight = nn.Parameter(torch.zeros(3))

        def reset_parameters(self) -> None:
            for number, tensor in enumerate((self.table, self.head, self.weight)):
                tensor.data.fill_(3.0 - number)

    model = meta(lambda: given(Views()))
    assert model.again is model.table
    assert model.table.tolist() == [2.0] * 2 + [3.0] * 6
    assert model.head.tolist() == [2.0] * 2
    model.head.fill_(5.0)
    assert model.table.tolist() == [5.0] * 2 + [3.0] * 6


@pytest.mark.parametrize(
    ("kind", "trained"), [(KeyboardInterrupt, True), (OSError, True), (OSError, False)]
)
def test_weights_that_are_cut_off_are_not_left_behind(
    kind: type[BaseException], trained: bool, tmp_path: Path
) -> None:
    """All is on the meta device again, though the traceback holds views of it; the next
    block gives it by what was noted before, which nobody has to say again."""
    state = {name: torch.full_like(t, 0.25) for name, t in plain().state_dict().items()}
    save_file({n: t.clone() for n, t in state.items()}, tmp_path / "weights.safetensors")
    cuts = 1

    def interrupted(module: nn.Module) -> None:
        nonlocal cuts
        cuts -= 1
        if cuts >= 0:
            first, rest = model.hidden[0].weight[:1], model.hidden[0].weight[1:]
            first.fill_(1.0)
            raise kind(f"gone, with {len(rest)} more")
        module.reset_parameters()

    model = meta(Net).requires_grad_(trained)
    model.head.weight.no_decay = True
    dynoffload.materialize(model, (tmp_path / "weights.safetensors", interrupted))
    error = refused(model, "gone", kind)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert error.__traceback__ is not None
    assert model.to("cpu") is model
    with paged(model, None):
        model(SAMPLES[0])
    assert_same(dict(model.state_dict()), state, "weights")  # by the file, as was said
    assert_same(model.angles, plain().angles, "angles")
    assert model.head.weight.no_decay is True


def test_weights_noted_for_a_part_are_asked_for() -> None:
    with torch.device("meta"):
        inner = nn.Linear(32, 32)
    dynoffload.materialize(inner)
    model = nn.Sequential(inner, nn.ReLU())
    refused(model, "with the part '0' of this Sequential")
    assert inner.to(torch.bfloat16).weight.dtype == torch.bfloat16
    dynoffload.materialize(model, give)  # as the message says
    with dynoffload.offload(model, budget="8MiB"):
        assert torch.equal(inner.bias, torch.full_like(inner.bias, 0.25))
    assert inner.__dict__.keys().isdisjoint({"to", "cpu"})


def test_a_part_of_what_weights_are_noted_for_is_refused() -> None:
    """It would begin with zeros; by itself it is what it is again."""
    model = meta(lambda: nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))))
    dynoffload.materialize(model)
    refused(model[1], "was called with the Sequential whose part '1' this Sequential is")
    given(model[1])  # as the message says
    for one in (model[1], model, model[0]):  # nothing is noted any more
        with paged(one, None):
            assert one(torch.ones(1, 32)).any()


class Pair(nn.Module):
    """Two large tensors of one module, which initialises them, replaces a buffer, and may fail."""

    fails = 0
    stat: Tensor
    view: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(rows, 1024))
        self.second = nn.Parameter(torch.empty(rows, 1024))
        self.register_buffer("stat", torch.empty(8))
        self.register_buffer("view", torch.empty(4).expand(3, 4))

    def reset_parameters(self) -> None:
        """Write both, and put another buffer in the place of one."""
        self.stat = torch.zeros(8)
        nn.init.uniform_(self.first)
        nn.init.uniform_(self.second)
        self.fails -= 1
        if self.fails >= 0:
            raise OSError("the disk is gone")


def test_a_file_that_does_not_fit_is_refused_before_the_block(tmp_path: Path) -> None:
    """At the call, by name, with the model as it was."""
    state = {name: t.clone() for name, t in plain().state_dict().items()}
    good = tmp_path / "good.safetensors"
    save_file(state, good)
    cases = {
        "owner/nofile": r"there is no .*owner/nofile on this.*: name a directory.* of a hub has to",
        "folder": r"folder has neither model\.safetensors\.index\.json nor model\.safetensors",
        "text": r"text as safetensors: .*: it is damaged or incomplete, or only a pointer of Git",
        "short": r"short as safetensors: .*: it is damaged or incomplete",
        "shape": r"'scale' of .*shape has shape \[2\] but the model's has \[\]",
        "lacking": r"lacking has no tensor 'hidden\.0\.bias': give one whose names",
        "index.json": r"index\.json is no index of safetensors files",
        "away.json": r"away\.json names a file outside of its directory: '\.\./good",
        "short.json": r"good\.safetensors has no tensor 'more', which .*short\.json says",
    }
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("these are no weights")
    (tmp_path / "short").write_bytes(good.read_bytes()[:-100])
    save_file({**state, "scale": torch.ones(2)}, tmp_path / "shape")
    save_file({n: t for n, t in state.items() if n != "hidden.0.bias"}, tmp_path / "lacking")
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "away.json").write_text('{"weight_map": {"scale": "../good.safetensors"}}')
    (tmp_path / "short.json").write_text('{"weight_map": {"more": "good.safetensors"}}')
    for name, said in cases.items():
        model = meta(Net)
        for init in (tmp_path / name, (tmp_path / name, lambda module: None)):
            with pytest.raises(ConfigError, match=said):
                dynoffload.materialize(model, init)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("named", ["directory", "index"])
def test_weights_in_shards(named: str, tmp_path: Path) -> None:
    """As transformers saves a large model, with one name of a tied tensor; what the user writes
    after that is later."""
    state = {name: t.clone() for name, t in plain().state_dict().items()}
    tied = state.pop("embedding.weight")  # which is head.weight
    names = sorted(state)
    shards = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for file, some in shards.items():
        save_file({name: state[name] for name in some}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {name: f for f, some in shards.items() for name in some}})
    )
    model = meta(Net)

    def angles(module: nn.Module) -> None:
        if isinstance(module, Net):
            module.reset_parameters()

    dynoffload.materialize(model, (tmp_path if named == "directory" else index, angles))
    with paged(model, None):
        with torch.no_grad():
            model.hidden[2].bias.fill_(7.0)
        model(SAMPLES[0])
        state |= {"hidden.2.bias": torch.full((32,), 7.0), "embedding.weight": tied}
        assert_same(dict(model.state_dict()), state, "weights")
        assert_same(model.angles, plain().angles, "angles")


@pytest.mark.parametrize("backend", [*BACKENDS, "accelerator"])
def test_a_parameter_beside_one_on_meta_keeps_its_values(backend: str) -> None:
    """Also where its module writes both, and fails; so do buffers, one that was replaced and one
    whose elements share memory and cannot be written. The other gets memory of its own, though it
    was a part of a tensor."""
    model = meta(lambda: Pair(256).requires_grad_(requires_grad=False))
    model.second = nn.Parameter(meta(lambda: torch.empty(512, 1024))[256:], requires_grad=False)
    assert model.second.storage_offset() > 0
    values = torch.arange(1024.0).sub_(512.0).repeat(256, 1)
    values[5, 7], values[25, 3] = -0.0, math.nan
    model.first = nn.Parameter(values.clone(), requires_grad=False)
    model.stat, model.view = torch.full((8,), 7.0), torch.arange(4.0).expand(3, 4)
    buffers = {"stat": model.stat.clone(), "view": model.view.clone()}
    model.fails = 1
    with pytest.raises(OSError, match="gone"), entered(backend, model):
        pytest.fail("the block must not begin")
    assert_same(model.first.detach(), values, "after the failure")
    assert_same(dict(model.named_buffers()), buffers, "after the failure")
    assert model.second.is_meta
    torch.manual_seed(5)
    with entered(backend, model):
        assert_same(model.first.detach().clone(), values, "in the block")
    torch.manual_seed(5)
    expected = Pair(256)
    expected.reset_parameters()
    assert_same(model.first.detach(), values, "after it")
    assert_same(dict(model.named_buffers()), buffers, "after it")
    assert_same(model.second.detach(), expected.second.detach(), "what was initialised")
