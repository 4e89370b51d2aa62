"""Blocks: cut where samples decide, small enough to move, and named so that samples compare."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from dynoffload.errors import PilotError
from dynoffload.planning.blocks import UNSEEN, Vocabulary
from dynoffload.planning.calls import CallSummary, summarize_calls
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.profiler import (
    Idioms,
    InputFeatures,
    ModuleCall,
    Operator,
    Phase,
    RegionInfo,
    Trace,
)


class Call:
    """One call of a tree of calls, from which a program is written down."""

    def __init__(self, path: str, key: str = "2x8", inner: Sequence[Call] = (), own: int = 0):
        self.path, self.key, self.inner, self.own = path, key, inner, own


def program(root: Sequence[Call], network: str = "net") -> CallSummary:
    """Write the summary of some calls; a call with ``own`` bytes has one parameter and two states.

    Every call with bytes of its own leaves 10 bytes of activations.
    """
    calls: list[ModuleCall] = []
    operators: list[Operator] = []
    regions: list[RegionInfo] = []
    number: dict[str, int] = {}

    def write(call: Call, parent: int) -> None:
        index, start = len(calls), len(operators)
        calls.append(ModuleCall(call.path, call.key, parent, start, start))
        if call.own:
            if call.path not in number:
                number[call.path] = len(regions)
                name = f"{call.path}.weight"
                regions.append(RegionInfo(name, "parameter", call.own))
                regions.append(RegionInfo(f"{name}:grad", "gradient", call.own))
                regions.append(RegionInfo(f"{name}:exp_avg", "state", call.own))
            uses = ((number[call.path],), (len(regions),))
            stream = Idioms(stream=1)
            regions.append(RegionInfo("", "activation", 10, born=start))
            operators.append(
                Operator("", Phase.FORWARD, call.path, index, stream, 0, 0, 0.0, *uses, 0)
            )
        for inner in call.inner:
            write(inner, index)
        calls[index] = ModuleCall(call.path, call.key, parent, start, len(operators))

    for call in root:
        write(call, -1)
    sample = InputFeatures({})
    return summarize_calls(Trace(network, "", 0, "", sample, regions, calls, operators))


def linear(path: str, own: int = 100) -> Call:
    return Call(path, own=own)


def moe(*hit: int, layers: int = 1) -> CallSummary:
    """A step of a mixture of experts: attention of two linears, a router, the experts hit."""
    inner = []
    for layer in range(layers):
        at = f"layers.{layer}"
        attention = Call(f"{at}.attn", inner=[linear(f"{at}.attn.qkv"), linear(f"{at}.attn.out")])
        experts = [
            Call(f"{at}.moe.experts.{e}", key=f"{e}x8",
                 inner=[linear(f"{at}.moe.experts.{e}.{part}") for part in ("up", "down")])
            for e in hit
        ]  # fmt: skip
        router = linear(f"{at}.moe.router")
        inner.append(Call(at, inner=[attention, Call(f"{at}.moe", inner=[router, *experts])]))
    return program([Call("", inner=[linear("embed"), *inner, linear("head")])])


def tree(*arities: int) -> CallSummary:
    """A step of a tree network: one cell per node, told apart by its number of children."""
    cells = [Call("cell", key=f"{arity}x4", inner=[linear("cell.a")], own=50) for arity in arities]
    return program([Call("", inner=[linear("embed"), *cells, linear("head")])])


def names(vocabulary: Vocabulary, order: Iterable[tuple[int, int]]) -> list[str]:
    return [vocabulary.blocks[index].name if index >= 0 else "?" for _, index in order]


def test_experts_are_blocks_and_attention_is_one() -> None:
    programs = [moe(0, 2), moe(1, 2), moe(0, 1, 2)]
    vocabulary = build_vocabulary(programs)
    assert names(vocabulary, vocabulary.encode(programs[2])) == [
        "embed",
        "layers.0.attn",
        "layers.0.moe.router",
        "layers.0.moe.experts.0",
        "layers.0.moe.experts.1",
        "layers.0.moe.experts.2",
        "head",
    ]
    assert names(vocabulary, vocabulary.encode(programs[0]))[3:5] == [
        "layers.0.moe.experts.0",
        "layers.0.moe.experts.2",
    ]
    assert vocabulary.repeated == frozenset()


def test_one_skipped_expert_in_any_sample_opens_the_layer() -> None:
    always = build_vocabulary([moe(0, 1), moe(0, 1)])
    assert [block.name for block in always.blocks] == ["embed", "layers.0", "head"]
    skipped = build_vocabulary([moe(0, 1)] * 20 + [moe(0)])
    assert "layers.0.moe.experts.1" in {block.name for block in skipped.blocks}
    assert not {"layers.0", "layers.0.moe"} & {block.name for block in skipped.blocks}


def test_cells_are_blocks_by_variant() -> None:
    vocabulary = build_vocabulary([tree(0, 0, 2), tree(0, 1)])
    assert vocabulary.repeated == {"cell"}
    order = vocabulary.encode(tree(0, 1, 2, 9))
    cells = ["cell[0x4]", "cell[1x4]", "cell[2x4]", "cell"]
    assert names(vocabulary, order) == ["embed", *cells, "head"]
    assert vocabulary.index_of("cell", "2x4") == order[3][1]
    assert vocabulary.index_of("head", "any") == order[5][1]
    assert names(vocabulary, vocabulary.encode(tree(2))) == ["embed", "cell[2x4]", "head"]


def test_a_cell_in_shapes_that_nobody_saw_uses_what_the_others_used() -> None:
    vocabulary = build_vocabulary([tree(0, 0, 2), tree(0, 1)])
    cells = [block for block in vocabulary.blocks if block.path == "cell"]
    seen, other = cells[:-1], cells[-1]
    assert other.variant == ""
    assert vocabulary.index_of("cell", "9x4") == other.index == len(vocabulary) - 1
    assert all(block.visits == other.visits for block in seen)
    assert all(block.nbytes == other.nbytes for block in seen)
    assert other.activation_bytes == max(block.activation_bytes for block in seen)
    assert vocabulary == vocabulary.from_json(vocabulary.to_json())


def test_shapes_that_run_other_modules_say_nothing_of_those_nobody_saw() -> None:
    """A call without tensors is a variant like others."""
    calls = [Call("node", key, inner=[linear(f"node.{n}")]) for n, key in enumerate(("", "2"))]
    one = program([Call("", inner=calls)])
    vocabulary = build_vocabulary([one])
    assert names(vocabulary, vocabulary.encode(one)) == ["node[()]", "node[2]"]
    assert vocabulary.index_of("node", "7") == UNSEEN


def test_shapes_that_differ_between_samples_only_are_no_variants() -> None:
    vocabulary = build_vocabulary([tree(2, 2, 2), tree(5, 5), tree(3)])
    assert vocabulary.repeated == frozenset()
    assert [block.name for block in vocabulary.blocks] == ["embed", "cell", "head"]
    order = vocabulary.encode(tree(9, 9))
    assert names(vocabulary, order) == ["embed", "cell", "cell", "head"]


def test_an_unseen_expert_is_one_unseen_block() -> None:
    vocabulary = build_vocabulary([moe(0), moe(1)])
    order = vocabulary.encode(moe(0, 2))
    assert names(vocabulary, order)[3:] == ["layers.0.moe.experts.0", "?", "head"]


def test_accumulation_does_not_make_a_module_a_loop() -> None:
    twice = program([Call("", inner=[linear("a"), linear("b")])] * 2)
    vocabulary = build_vocabulary([twice])
    assert vocabulary.repeated == frozenset()
    assert names(vocabulary, vocabulary.encode(twice)) == ["a", "b", "a", "b"]


def test_beyond_sixteen_variants_the_rarest_share_one() -> None:
    arities = [arity for arity in range(20) for _ in range(40 - arity)]
    vocabulary = build_vocabulary([tree(*arities)])
    cells = [block for block in vocabulary.blocks if block.path == "cell"]
    assert len(cells) == 16
    assert {block.variant for block in cells} == {"", *(f"{arity}x4" for arity in range(15))}
    assert names(vocabulary, vocabulary.encode(tree(3, 18, 99)))[1:4] == [
        "cell[3x4]",
        "cell",
        "cell",
    ]


def test_a_budget_cuts_what_is_too_large_to_move_at_once() -> None:
    programs = [moe(0, 2), moe(1, 2)]
    # An expert and attention use 2 modules x 3 regions x 100 bytes each.
    whole = build_vocabulary(programs, budget=8 * 600)
    assert "layers.0.attn" in {block.name for block in whole.blocks}
    cut = build_vocabulary(programs, budget=8 * 600 - 1)
    assert names(cut, cut.encode(programs[0])) == [
        "embed",
        "layers.0.attn.qkv",
        "layers.0.attn.out",
        "layers.0.moe.router",
        "layers.0.moe.experts.0.up",
        "layers.0.moe.experts.0.down",
        "layers.0.moe.experts.2.up",
        "layers.0.moe.experts.2.down",
        "head",
    ]
    for block in build_vocabulary(programs, budget=1).blocks:
        assert block.visits == (block.path,)


def test_a_loop_body_may_use_half_of_the_budget() -> None:
    body = 3 * 50 + 3 * 100
    kept = build_vocabulary([tree(0, 1)], budget=2 * body)
    assert {block.path for block in kept.blocks} == {"embed", "cell", "head"}
    cut = build_vocabulary([tree(0, 1)], budget=2 * body - 1)
    assert {block.path for block in cut.blocks} == {"embed", "cell", "cell.a", "head"}


def test_parameters_of_a_module_that_decides_are_a_block_of_their_own() -> None:
    def layer(*hit: int) -> CallSummary:
        experts = [linear(f"moe.experts.{e}") for e in hit]
        return program([Call("", inner=[Call("moe", inner=experts, own=7)])])

    vocabulary = build_vocabulary([layer(0), layer(1)])
    assert names(vocabulary, vocabulary.encode(layer(1))) == ["moe", "moe.experts.1"]
    assert (vocabulary.blocks[0].nbytes, vocabulary.blocks[0].idioms) == (3 * 7, Idioms(stream=1))


def test_the_root_is_no_block_unless_it_has_parameters_itself() -> None:
    static = program([Call("", inner=[linear("a"), linear("b")])])
    assert [block.path for block in build_vocabulary([static]).blocks] == ["a", "b"]
    bare = program([Call("", own=100)])
    vocabulary = build_vocabulary([bare])
    assert names(vocabulary, vocabulary.encode(bare)) == ["(root)"]


def test_programs_of_other_networks_are_refused() -> None:
    one, other = tree(0), program([linear("embed")], network="other")
    with pytest.raises(PilotError, match="two networks"):
        build_vocabulary([one, other])
    with pytest.raises(PilotError, match="profile the network at hand"):
        build_vocabulary([one]).encode(other)
    with pytest.raises(PilotError, match="profile some samples"):
        build_vocabulary([])


def test_a_vocabulary_survives_being_written_and_read() -> None:
    vocabulary = build_vocabulary([tree(0, 2), tree(1, 1, 0)])
    read = Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json())))
    assert read == vocabulary
    assert read.encode(tree(2, 0)) == vocabulary.encode(tree(2, 0))


def _drop(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["blocks"][0].pop(key)


def _put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["blocks"][0].update({key: value})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("format"),
        lambda document: document.update(version=99),
        lambda document: document.update(blocks={}),
        lambda document: document.update(network=7),
        lambda document: document.update(repeated="cell"),
        lambda document: document["blocks"].append(document["blocks"][0]),
        lambda document: document["blocks"].append("block"),
        _drop("visits"),
        _put("path", "x" * 5000),
        _put("nbytes", -1),
        _put("nbytes", True),
        _put("activation_bytes", 1.5),
        _put("idioms", [1, 2]),
        _put("visits", [3]),
    ],
)
def test_what_is_no_vocabulary_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    document = copy.deepcopy(build_vocabulary([tree(0, 2)]).to_json())
    Vocabulary.from_json(document)
    spoil(document)
    with pytest.raises(PilotError):
        Vocabulary.from_json(document)
