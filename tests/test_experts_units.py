"""The experts of fused layers are units: in traces, in vocabularies, and in sessions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Loop, Twin, compare_runs, needs_pager
from fused_networks import Chosen, mixtral, mixtral_loss, paging_of
from synthetic_pilot import label_of
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
import dynoffload.moe
from dynoffload.pilot.labels import encode_example
from dynoffload.pilot.train import learn_pilot
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler import Recorder, Trace, load_trace, save_trace
from dynoffload.profiler.experts import experts_hit, split_path, unit_path
from dynoffload.runtime.session import Session

pytest.importorskip("transformers")

IMPLEMENTATIONS = ("eager", "dynoffload", "grouped_mm", "batched_mm")


def _network(implementation: str = "eager") -> nn.Module:
    dynoffload.moe.register()
    return mixtral(implementation, num_local_experts=8)


def _chosen(model: nn.Module, seed: int) -> dict[str, list[int]]:
    """Return the experts that a sample's routers choose, by layer, as plain PyTorch runs it."""
    found: dict[str, list[int]] = {}

    def note(path: str, args: Any) -> None:
        found[path] = sorted(set(args[1].flatten().tolist()))

    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: note(path, args))
        for path, module in model.named_modules()
        if path.endswith(".experts")
    ]
    mixtral_loss(model, seed)
    for handle in handles:
        handle.remove()
    return found


def _traces(implementation: str, steps: int) -> tuple[list[Trace], list[dict[str, list[int]]]]:
    """Return recorded steps, and which experts each chose in a run without a recorder."""
    model, plain = _network(implementation), _network(implementation)
    traces: list[Trace] = []
    chosen = []
    optimizer, other = (AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    with Recorder(model, optimizer, on_step=traces.append):
        for seed in range(steps):
            mixtral_loss(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    for seed in range(steps):
        chosen.append(_chosen(plain, seed))
        mixtral_loss(plain, seed).backward()
        other.step()
        other.zero_grad()
    for one, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, same)
    return traces, chosen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_trace_records_the_experts_of_each_layer(implementation: str, tmp_path: Any) -> None:
    traces, chosen = _traces(implementation, 3)
    for trace, hit in zip(traces, chosen, strict=True):
        for site, numbers in hit.items():
            layer = next(n for n, call in enumerate(trace.calls) if call.path == site)
            ran = [call.path for call in trace.calls if call.parent == layer]
            assert [path for path in ran if split_path(path)[1] is not None] == [
                unit_path(site, number) for number in numbers
            ]
            assert trace.slices[f"{site}.down_proj"] == 8
        assert not [one for one in trace.operators if "unique" in one.name]
    save_trace(traces[0], tmp_path / "a.trace")
    assert load_trace(tmp_path / "a.trace") == traces[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_are_blocks_with_their_share_of_the_bytes(implementation: str) -> None:
    traces, chosen = _traces(implementation, 4)
    labels = [label_of(trace) for trace in traces]
    vocabulary = build_vocabulary([label.calls for label in labels])
    expert = 3 * 64 * 32 * 4  # gate, up and down, in float32
    for label, hit in zip(labels, chosen, strict=True):
        order = [vocabulary.blocks[b] for b in encode_example(vocabulary, label).blocks]
        assert [b.path for b in order if split_path(b.path)[1] is not None] == [
            unit_path(site, number) for site, numbers in hit.items() for number in numbers
        ]
        for block in order:
            if split_path(block.path)[1] is not None:
                assert block.nbytes == 4 * expert  # with gradient and two moments
                assert block.visits == (block.path,)
    sites = {split_path(b.path)[0] for b in vocabulary.blocks if split_path(b.path)[1] is not None}
    assert not sites & {block.path for block in vocabulary.blocks}


def _loss(model: nn.Module, seed: int) -> Tensor:
    return mixtral_loss(model, seed)


@needs_pager
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_session_records_the_experts_that_run(implementation: str, trained: bool) -> None:
    """The order is the same before the model is paged; results are those of plain PyTorch."""
    traces, chosen = _traces(implementation, 6)
    pilot: Any = None
    if trained:
        labels = [label_of(trace) for trace in traces]
        vocabulary = build_vocabulary([label.calls for label in labels])
        pilot = learn_pilot(vocabulary, [encode_example(vocabulary, label) for label in labels])
    twin = Twin(_network(implementation), lambda p: AdamW(p, lr=1e-2))
    pages = {"page_bytes": 4096, "min_paged_bytes": 2048}
    session = compare_runs(
        twin, Loop(steps=6), list(range(6)), _loss, 900_000, pilot=pilot, config=pages
    )
    assert session.stats["bytes_in"].sum() > 0
    for blocks, hit in zip(session.log.blocks, chosen, strict=True):
        experts = [path for path in blocks.actual if split_path(path)[1] is not None]
        assert experts == [
            unit_path(site, number) for site, numbers in hit.items() for number in numbers
        ]


@needs_pager
@pytest.mark.parametrize(("least", "sliced"), [(2048, True), (16384, True), (16385, False)])
def test_a_predicted_expert_is_all_that_its_layer_pages(least: int, sliced: bool) -> None:
    """Its slices, and what the layer pages whole: the second matrices from 16 KiB on, or all."""
    traces, chosen = _traces("eager", 3)
    labels = [label_of(trace) for trace in traces]
    vocabulary = build_vocabulary([label.calls for label in labels])
    pilot = learn_pilot(vocabulary, [encode_example(vocabulary, label) for label in labels])
    model = _network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    config = {"page_bytes": 4096, "min_paged_bytes": least}
    with dynoffload.offload(
        model, optimizer, budget=1_800_000, pilot=pilot, config=config
    ) as session:
        units = session._forecast._units_of(encode_example(vocabulary, labels[0]).blocks)
    for site, numbers in chosen[0].items():
        whole = [site] if least > 8192 else []
        slices = [unit_path(site, number) for number in numbers] if sliced else []
        assert [unit.path for unit in units if unit.path.startswith(site)] == whole + slices


def test_what_a_call_does_not_say_is_not_read() -> None:
    layer = Chosen().experts
    assert experts_hit(layer, (torch.ones(2, 32), [1, 2]), {}) is None
    assert experts_hit(layer, (torch.ones(2, 32), torch.tensor([[9]])), {}) is None
    assert experts_hit(nn.Linear(2, 2), (torch.tensor([[1]]),), {}) is None
    said = {"top_k_index": torch.tensor([[4, 6], [1, 4]])}
    assert experts_hit(layer, (torch.ones(2, 32),), said) == [1, 4]
    assert experts_hit(layer, (torch.ones(1, 2, 32),), said) == [1, 4]
    assert split_path("a.b[12]") == ("a.b", 12)
    assert split_path("a.b") == ("a.b", None)


@needs_pager
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("least", [2048, 16384])
def test_experts_beside_what_their_layer_pages_whole_are_planned(
    least: int, implementation: str
) -> None:
    """The second matrices, of 8 KiB, are paged by slices or whole."""
    model = _network(implementation)
    optimizer = AdamW(model.parameters(), lr=1e-7)
    config = {"page_bytes": 4096, "min_paged_bytes": least, "policy": "repeat"}
    with dynoffload.offload(model, optimizer, budget=1_800_000, config=config) as session:
        migrator = paging_of(session).migrator
        for step in range(6):
            if step == 3:
                migrator.missed = 0
            mixtral_loss(model, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert migrator.anchored > 0
        assert migrator.missed == 0
        _assert_planned(session)


def _assert_planned(session: Session) -> None:
    """Check that what is paged whole beside experts is a part of their uses in both directions."""
    reference = paging_of(session).migrator._reference
    units = session._forecast._units.values()
    experts = [unit for unit in units if unit.number is not None and unit.index in reference.ahead]
    assert experts
    for unit in experts:
        beside = {slot.region for slot in unit.beside}
        places = [*reference.ahead[unit.index], reference.backward[unit.slots[0].region][0]]
        for place in places:
            assert beside <= {*reference.uses[place].regions}


@pytest.mark.parametrize(
    "call",
    [
        (torch.tensor([[1, 2]]),),
        (torch.ones(2, 32), torch.tensor([1, 2])),
        (torch.ones(2, 32), torch.tensor([[1, 2]])),
        (torch.ones(1, 2, 32), torch.tensor([[1, 2]])),
        (torch.ones(1, 16), torch.tensor([[1, 2]])),
        (torch.ones(1, 32), torch.tensor([[1, 2, 3, 4, 5, 0, 1]])),
    ],
)
def test_token_ids_are_no_experts(call: tuple[Tensor, ...]) -> None:
    """Indices of experts have a row for each token of the hidden states beside them."""
    assert experts_hit(Chosen().experts, call, {}) is None


def test_a_call_under_vmap_is_not_read() -> None:
    layer = Chosen().experts
    read = []

    def call(indices: Tensor) -> Tensor:
        read.append(experts_hit(layer, (torch.ones(1, 32), indices), {}))
        return indices

    torch.func.vmap(call)(torch.tensor([[[1]], [[2]]]))
    assert read == [None]
