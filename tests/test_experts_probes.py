"""Routers of fused experts are found by structure, and asked ahead without effect on a network."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from exactness import Loop, Twin, compare_runs, needs_pager
from fused_networks import Experts, mixtral, mixtral_loss, paging_of
from test_moe_transformers import FAMILIES, built
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dynoffload
from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError, TraceError
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.tracking import StepTracker
from dynoffload.profiler import Recorder, RoutingProbe, Trace
from dynoffload.profiler.experts import split_path, unit_path
from dynoffload.profiler.routing import hinted, probes_of, read_early
from dynoffload.runtime.migration import host_time
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.migration.gates import Trial
from dynoffload.runtime.sizing import sizing_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_is_asked_about_its_experts(family: str) -> None:
    """Given the input that its mixture gets, it names the experts that the mixture runs."""
    model = built(family, "eager")
    table = probes_of(model)
    sites = [path for path, _ in model.named_modules() if path.endswith(".experts")]
    inputs: dict[str, Tensor] = {}
    ran: dict[str, set[int]] = {}
    for path in sites:
        mixture = path.rpartition(".")[0]
        model.get_submodule(mixture).register_forward_pre_hook(
            lambda _, args, path=path: inputs.update({path: args[0].detach()})
        )
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: ran.update({path: set(args[1].flatten().tolist())})
        )
    model(input_ids=torch.arange(2, 5)[None])
    for before, site in pairwise(sites):
        (hint,) = hinted(table, before, (inputs[site],), 0)
        assert hint.blocks == tuple(unit_path(site, n) for n in range(len(hint.blocks)))
        assert {n for n, value in enumerate(hint.values) if value > 0.5} == ran[site]
    layers = [site.rpartition(".")[0].rpartition(".")[0] for site in sites]
    (hint,) = hinted(table, layers[0], (inputs[sites[0]],), 0)
    assert hint.blocks[0] == unit_path(sites[0], 0)
    assert not table.keys() & set(layers[1:])


@pytest.mark.parametrize("number", [0, 1])
def test_what_moves_all_tokens_alike_is_learned(number: int) -> None:
    """Between the early answer and the mixture, attention adds the same to each token here."""
    model = mixtral(num_local_experts=16)
    model.requires_grad_(requires_grad=False)
    table = probes_of(model)
    layer = model.model.layers[number]
    asked = "model.layers.0.mlp.experts" if number else "model.layers.0"
    norm = nn.Identity() if number else layer.post_attention_layernorm
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(32, generator=generator)
    right: list[float] = []
    for _ in range(300):
        x = torch.randn(3, 32, generator=generator)
        (hint,) = hinted(table, asked, (x, torch.zeros(3, 2, dtype=torch.long)), 0)
        chosen = layer.mlp.gate(norm(x + moved))[2]
        told = torch.tensor(hint.values) > 0.5
        hit = torch.zeros(16, dtype=torch.bool).scatter(0, chosen.flatten(), True)
        right.append(float((told & hit).sum() / (told | hit).sum()))
        hinted(table, f"model.layers.{number}.mlp.experts", (x, chosen), 0)
    assert sum(right[-50:]) / 50 > sum(right[:1]) + 0.2
    assert sum(right[-50:]) / 50 > 0.6


def test_the_first_of_each_stack_is_asked_as_its_layer_begins() -> None:
    model = nn.ModuleDict({"one": mixtral(), "other": mixtral(hidden_size=64)})
    heads = [path for path in probes_of(model) if not path.endswith(".experts")]
    assert heads == ["one.model.layers.0", "other.model.layers.0"]


class _Restless(nn.Module):
    """A router that draws numbers, counts in a buffer and in an attribute, and returns indices."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 32, generator=torch.Generator().manual_seed(3)))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6))
        self.runs = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        type(self).calls += 1
        self.runs += 1
        logits = F.linear(x * (1 + 0.01 * torch.rand_like(x)), self.weight)
        chosen = (logits + 0.01 * self.seen).topk(2).indices
        with torch.no_grad():
            self.seen += F.one_hot(chosen, 6).sum((0, 1))
        return logits, chosen


_Restless.__module__ = "transformers.restless"  # routers are found among those of transformers


class _Indexed(Experts):
    """Fused experts that are called with indices."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:  # type: ignore[override]
        """Return ``[rows, width]`` for the same."""
        return super().forward(x, sorted(set(chosen.flatten().tolist())))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate, self.mlp.experts = _Restless(), _Indexed()
        self.mlp.forward = self._mix
        self.norm = nn.LayerNorm(32)

    def _mix(self, x: Tensor) -> Tensor:
        logits, chosen = self.mlp.gate(x)
        mixed: Tensor = self.mlp.experts(x, chosen)
        return mixed * logits.softmax(1).amax(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(1 + seed % 4, 32, generator=torch.Generator().manual_seed(seed))
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def _loss(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(seed)
    return loss


@needs_pager
@pytest.mark.parametrize("given", [False, True])
def test_asking_changes_nothing_of_a_router(given: bool) -> None:
    """Neither its random numbers, buffers nor attributes, nor what its hooks see."""
    seen: list[int] = []
    probe = RoutingProbe("layers.0", ("layers.0.mlp.experts[1]",), lambda x: torch.rand(1))
    twin = Twin(_Network(), lambda p: AdamW(p, lr=1e-2))
    pages: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 2048}
    if given:
        pages["routing_probes"] = [probe]
    session = compare_runs(twin, Loop(steps=24), list(range(24)), _loss, 1_200_000, config=pages)
    assert session.stats["bytes_in"].sum() > 0
    model = _Network()
    _Restless.calls = 0
    for layer in model.layers:
        layer.mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    traces: list[Trace] = []
    with Recorder(model, on_step=traces.append):
        _loss(model, 3).backward()
    assert [layer.mlp.gate.runs for layer in model.layers] == [1, 1, 1]
    assert len(seen) == 3
    assert _Restless.calls == 3 + 3  # each once early
    assert len(traces[0].hints) == 3


def test_routers_of_others_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what calling them once more does."""
    monkeypatch.setattr(_Restless, "__module__", "network")
    assert probes_of(_Network()) == {}


def test_weights_that_are_paged_are_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """The plan line says how many mixtures have routers that are."""
    caplog.set_level("INFO", "dynoffload")
    model = mixtral(num_local_experts=8)
    optimizer = AdamW(model.parameters())
    for least, asked in ((2048, True), (512, False)):  # a router has 1,024 bytes
        config = {"page_bytes": 4096, "min_paged_bytes": least}
        with dynoffload.offload(model, optimizer, budget=900_000, config=config) as session:
            forecast = session._forecast
            places = [*forecast.probing.places(forecast._units)]
            assert any(one.reads for _, probes, _ in places for one in probes) is asked
        few = "2" if asked else "0 of 2"
        assert f"policy pilot, routers of {few} mixtures are asked" in caplog.text
        caplog.clear()
    config = {"routing_probes": ()}
    with dynoffload.offload(model, optimizer, budget=900_000, config=config):
        assert caplog.messages[0].endswith("policy pilot")


@needs_pager
@pytest.mark.parametrize(("layers", "asked"), [(2, True), (10, False)])
def test_routers_stay_in_memory_unless_they_take_an_eighth(layers: int, asked: bool) -> None:
    """Each takes 16 KiB, as the least tensor that is paged, and four times that in training."""
    model = mixtral(num_local_experts=128, intermediate_size=16, num_hidden_layers=layers)
    optimizer = AdamW(model.parameters())
    config = {"page_bytes": 4096}
    with dynoffload.offload(model, optimizer, budget=256 << 14, config=config) as session:
        assert session.sizing.min_paged_bytes <= 1 << 14
        recorded = json.loads(json.dumps(asdict(session.sizing)))  # as results keep it
        routers = [name for name in recorded["asked"] if name.endswith("mlp.gate.weight")]
        assert len(routers) == asked * layers
        forecast = session._forecast
        places = [*forecast.probing.places(forecast._units)]
        assert any(one.reads for _, probes, _ in places for one in probes) is asked


@pytest.mark.parametrize("layers", [1, 2])
def test_routers_do_not_make_a_budget_too_small(layers: int) -> None:
    """Where there is no room for them too, they are paged; what an error recommends is enough."""
    sizes = {"num_local_experts": 16, "hidden_size": 128, "intermediate_size": 128}
    model = mixtral(num_hidden_layers=layers, **sizes)
    optimizer = AdamW(model.parameters())

    def lacking(budget: int, **config: Any) -> int:
        try:
            asked.add(bool(sizing_of(model, optimizer, budget, OffloadConfig(**config)).asked))
        except BudgetError as error:
            return error.lacking
        return 0

    asked = set[bool]()
    for budget in range(540_000, 1_200_000, 16_384):
        lacks = lacking(budget)
        assert lacks <= lacking(budget, routing_probes=())
        assert lacking(budget + lacks) == 0
    assert asked == {True, False}


def test_where_all_experts_are_hit_none_is_computed() -> None:
    model = _Network()
    for layer in model.layers:
        layer.mlp.gate.seen.copy_(torch.tensor([0, 1e6, 0, 0, 1e6, 0]))  # the same two, always
    table = probes_of(model)
    every = torch.arange(6).view(3, 2)
    hinted(table, "layers.0.mlp.experts", (torch.ones(3, 32), every), 0)
    _Restless.calls = 0
    (hint,) = hinted(table, "layers.0", (torch.ones(3, 32),), 0)
    assert hint.values == (1.0,) * 6
    assert _Restless.calls == 0
    hinted(table, "layers.0.mlp.experts", (torch.ones(2, 32), every[:2]), 0)
    _Restless.calls = 0
    (hint,) = hinted(table, "layers.0", (torch.ones(3, 32),), 0)
    assert _Restless.calls == 1
    assert [n for n, value in enumerate(hint.values) if value > 0.5] == [1, 4]


def test_a_users_own_probes_are_asked_alone() -> None:
    model = mixtral()
    site = "model.layers.1.mlp.experts"
    probe = RoutingProbe(
        "model.layers.0", (unit_path(site, 2), unit_path(site, 0)), lambda x: torch.ones(2) / 4
    )
    traces: list[Trace] = []
    with Recorder(model, routing_probes=[probe], on_step=traces.append):
        mixtral_loss(model, 1).backward()
    (hint,) = traces[0].hints
    assert (hint.blocks, hint.values) == (probe.blocks, (0.25, 0.25))
    assert split_path(hint.blocks[0]) == (site, 2)
    assert probes_of(model, []) == {}
    stranger = RoutingProbe("model.layers.0", (unit_path(site, 4),), lambda x: None)
    with pytest.raises(TraceError, match=r"names \['model.layers.1.mlp.experts\[4\]'\]"):
        probes_of(model, [stranger])


@needs_pager
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_step_that_is_not_predicted_follows_the_routers(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    monkeypatch.setattr(Forecast, "_may_predict", lambda self: self._begun < 6)
    monkeypatch.setattr(Forecast, "_may_steer", lambda self: True)
    monkeypatch.setattr(Trial, "observe", lambda self, step, on_demand: on_demand)
    done: list[str] = []
    for kind, name in ((Pilot, "glance"), (StepTracker, "hint")):
        method = getattr(kind, name)

        def noted(self: Any, *given: Any, name: str = name, method: Any = method) -> Any:
            done.append(name)
            return method(self, *given)

        monkeypatch.setattr(kind, name, noted)
    network = partial(mixtral, implementation, num_local_experts=16, num_experts_per_tok=1)
    twin = Twin(network(), lambda p: AdamW(p, lr=1e-3))
    pages = {"page_bytes": 4096, "min_paged_bytes": 4096}
    samples = list(range(15))
    session = compare_runs(twin, Loop(steps=15), samples, mixtral_loss, 1_500_000, config=pages)
    assert session.stats["bytes_in"].sum() > 0
    assert session._forecast.source == "the pilot"
    assert done.count("glance") == 9
    assert done[done.index("glance") :].count("hint") == 2 * 9  # of two mixtures


@needs_pager
def test_experts_that_may_well_not_run_again_are_not_fetched_in_backward() -> None:
    model = mixtral(num_local_experts=16, num_experts_per_tok=1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    pages = {"page_bytes": 4096, "min_paged_bytes": 4096}
    with dynoffload.offload(model, optimizer, budget=1_500_000, config=pages) as session:
        for seed in range(6):
            mixtral_loss(model, seed).backward()
            reference = paging_of(session).migrator._reference
            optimizer.step()
            optimizer.zero_grad()
        units = {unit.path: unit for unit in session._forecast._units.values()}
        unsure = {
            path: [reference.uses[place].doubtful for place in reference.ahead[unit.index]]
            for path, unit in units.items()
            if unit.index in reference.ahead
        }
        assert len(unsure) > 8
        for path, each in unsure.items():
            assert each == [split_path(path)[1] is not None]


@needs_pager
def test_what_is_asked_is_seen_by_no_mode_of_the_users() -> None:
    counted = []
    for budgeted in (False, True):
        model = mixtral(num_local_experts=8)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with contextlib.ExitStack() as stack:
            if budgeted:
                pages = {"page_bytes": 4096, "min_paged_bytes": 2048}
                stack.enter_context(
                    dynoffload.offload(model, optimizer, budget=900_000, config=pages)
                )
            for seed in range(4):
                with FlopCounterMode(display=False) as counter:
                    mixtral_loss(model, seed).backward()
                optimizer.step()
                optimizer.zero_grad()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


def test_a_recorder_leaves_selective_checkpointing_alone() -> None:
    """Which keeps results of products by their order, those of probes would be among them."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    models = []
    for recorded in (False, True):
        model = mixtral(num_local_experts=8)
        for layer in model.model.layers:
            layer.mlp.forward = partial(
                checkpoint, layer.mlp.forward, use_reentrant=False, context_fn=contexts
            )
        with Recorder(model, on_step=lambda _: None) if recorded else contextlib.nullcontext():
            for seed in range(3):
                mixtral_loss(model, seed).backward()
        models.append(model)
    for plain, one in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain.grad, one.grad)


class _Unknown(_Network):
    @property
    def routing_probes(self) -> Any:
        raise RuntimeError("it is not known yet")


@needs_pager
def test_a_network_whose_routers_cannot_be_found_is_trained() -> None:
    twin = Twin(_Unknown(), lambda p: AdamW(p, lr=1e-2))
    own = {"min_paged_bytes": None}  # what is found decides which routers stay
    session = compare_runs(twin, Loop(steps=4), list(range(4)), _loss, 1_200_000, config=own)
    assert session._forecast.probing._table is None


def test_a_module_is_no_method_that_returns_probes() -> None:
    model = _Network()
    routers = {layer.mlp.gate.weight for layer in model.layers}
    assert routers <= read_early(model)
    model.routing_probes = nn.Linear(2, 2)
    assert routers <= read_early(model)
    assert probes_of(model)
