"""Watched steps, the oracle, online baselines, and their scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynoffload.experiments import ablation, ablation_sessions, general, material
from dynoffload.experiments import watched as module
from dynoffload.experiments.ablation_blocks import MODULES, PLANNED
from dynoffload.experiments.ablation_sessions import (
    CLAIRVOYANT,
    CONTROL,
    POLICIES,
    Contest,
    train_in_turns,
)
from dynoffload.experiments.contest import Turns
from dynoffload.experiments.general import GeneralPilot
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.pilot_recording import CASES, Case, recorded
from dynoffload.experiments.predictors import Markov, MostFrequent, Online, RepeatLast
from dynoffload.experiments.scoring import score
from dynoffload.experiments.watched import (
    MATERIAL,
    MIXTURES,
    OTHERS,
    SUBJECTS,
    Training,
    Watched,
    watch,
)
from dynoffload.experiments.ways import Spec
from dynoffload.pilot import general_training
from dynoffload.pilot.evaluate import block_order_accuracy, one_ahead
from dynoffload.pilot.features import Example
from dynoffload.pilot.general import General, packaged
from dynoffload.pilot.labels import label_traces
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.progress import Report
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.experts import split_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps are small
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def moe() -> Watched:
    return watch(SUBJECTS["moe_8"], STEPS, 1, oracle=True)


@pytest.fixture(scope="module")
def depths() -> Watched:
    subject = SUBJECTS["depths"]
    case = replace(CASES["depths"], before=0)
    return watch(replace(subject, begin=lambda *given: module._of_zoo(case, *given)), STEPS, 0)


def _paths(watched: Watched, example: Example) -> list[str]:
    return [watched.vocabulary.blocks[block].path for block in example.blocks]


def test_families_are_left_out_together() -> None:
    assert len(SUBJECTS) == len(CASES) + 4
    assert len(MATERIAL) >= 40
    families = {one.key: one.family for one in (*MATERIAL.values(), *SUBJECTS.values())}
    assert families["mixtral"] == families["deepseek_v3"] == families["jamba"] == MIXTURES
    assert families["tree"] == families["tree_untied"]
    assert families["evoformer"] == families["esmfold"]
    assert MATERIAL["esmfold"].family == SUBJECTS["esmfold"].family
    assert families["bert"] == OTHERS


def test_units_run_in_the_order_of_a_trace(moe: Watched) -> None:
    case = CASES["moe_8"]
    spec = Spec(case.network, case.preset, shape=case.shape, lr=case.lr, seed=1, data_seed=1)
    with recorded(spec, STEPS, lambda *_: None) as folder:
        labels = label_traces(folder, 1, lambda *_: None)
    for example, label in zip(moe.examples, labels, strict=True):
        assert tuple(_paths(moe, example)) == label.calls.ran()[0]
        assert (example.sample, example.source) == (label.sample, label.source)
        assert [hint.values[0] for hint in example.hints] == [h.values[0] for h in label.hints]


def test_a_hint_about_a_module_is_about_the_units_inside(moe: Watched) -> None:
    paths = [block.path for block in moe.vocabulary.blocks]
    for example in moe.examples:
        own, ahead, last = example.hints  # of two layers with experts
        assert own.place == ahead.place < last.place
        assert {".".join(paths[b].split(".")[:2]) for b in own.blocks} == {"layers.0"}
        rest = example.blocks[own.place :]
        told = {b for b, value in zip(own.blocks, own.values, strict=True) if value > 0.5}
        assert told == set(own.blocks).intersection(rest)  # it knows its own decision


def test_units_have_idioms_and_bytes(moe: Watched) -> None:
    ran = {block for example in moe.examples for block in example.blocks}
    assert len(ran) < len(moe.vocabulary)  # others have those of units alike
    for block in moe.vocabulary.blocks:
        assert any(block.idioms)
        assert block.nbytes > 0


def test_the_oracle_knows_more_than_the_last_order(moe: Watched) -> None:
    orders = [example.blocks for example in moe.examples]
    assert moe.oracle != orders
    assert moe.oracle[0] == orders[0]  # no update before it
    for last, oracle, order in zip(orders, moe.oracle[1:], orders[1:], strict=False):
        assert block_order_accuracy(oracle, order) > block_order_accuracy(last, order)


@pytest.mark.parametrize("key", ["moe_8", "gan"])
def test_the_oracle_is_right_if_weights_stay(key: str) -> None:
    def begin(seed: int, report: Report) -> Training:
        training = SUBJECTS[key].begin(seed, report)
        for group in training.optimizer.param_groups:
            group["lr"] = 0.0
        return training

    found = watch(replace(SUBJECTS[key], begin=begin), STEPS, 0, oracle=True)
    assert found.oracle == [example.blocks for example in found.examples]
    assert len({tuple(order) for order in found.oracle}) > 1


def test_the_oracle_draws_the_random_numbers_of_the_step_and_changes_nothing() -> None:
    dropping = MATERIAL["wav2vec2"]  # skips layers by chance
    alone, twice = (watch(dropping, STEPS, 3, oracle=oracle) for oracle in (False, True))
    assert not alone.oracle
    assert twice.oracle == [example.blocks for example in twice.examples]
    assert twice.examples == alone.examples
    assert alone.varying


def test_experts_of_fused_layers_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(module, "_TRAINED", 1)
    found = watch(SUBJECTS["olmoe"], 3, 0, oracle=True)
    experts = [b for b in found.vocabulary.blocks if split_path(b.path)[1] is not None]
    assert len(experts) == 4 * 64
    assert all(any(block.idioms) for block in experts)
    for example in found.examples:
        assert len(example.hints) == 4


def test_a_convolution_is_no_layer_of_experts() -> None:
    pytest.importorskip("transformers")
    found = watch(MATERIAL["hubert"], 2, 0)
    assert not any(split_path(block.path)[1] for block in found.vocabulary.blocks)


# Baselines


def _examples(*orders: Sequence[int]) -> list[Example]:
    return [Example(InputFeatures({}), list(order)) for order in orders]


def _seen(predictor: Online, *orders: Sequence[int]) -> list[int]:
    for example in _examples(*orders):
        predictor.predict(example)
        predictor.observe(example)
    return predictor.predict(_examples([])[0])


@pytest.mark.parametrize("kind", [RepeatLast, MostFrequent, Markov])
def test_a_baseline_predicts_nothing_at_first_and_then_what_repeats(
    kind: type[RepeatLast] | type[MostFrequent] | type[Markov],
) -> None:
    assert _seen(kind()) == []
    assert _seen(kind(), [0, 2, 1]) == [0, 2, 1]
    assert _seen(kind(), [], []) == []


def test_the_last_order_is_repeated() -> None:
    assert _seen(RepeatLast(), [0, 1], [0, 2, 2]) == [0, 2, 2]


def test_the_most_frequent_blocks_keep_one_order() -> None:
    assert _seen(MostFrequent(), [0, 1, 3], [0, 2, 3], [0, 2, 3, 3]) == [0, 2, 3]
    assert _seen(MostFrequent(), [0, 3], [0, 1, 3], [0, 1, 3, 3], [0, 3, 3]) == [0, 1, 3, 3]


def test_a_chain_follows_the_most_frequent_successors() -> None:
    assert _seen(Markov(), [0, 1, 3], [0, 2, 3], [0, 2, 4]) == [0, 2, 3]
    assert _seen(Markov(), [0, 1, 0, 1, 0, 1, 2]) == [0, 1] * 3 + [0]  # a cycle ends


# Scores


def _watched(examples: list[Example], nbytes: Sequence[int]) -> Watched:
    none = Idioms(0, 0, 0, 0, 0, 0)
    blocks = (Block(n, f"b{n}", "", (f"b{n}",), of, 0, none) for n, of in enumerate(nbytes))
    vocabulary = Vocabulary("", tuple(blocks))
    return Watched(vocabulary, vocabulary, examples, [])


def test_scores_count_varying_blocks_and_their_bytes() -> None:
    found = _watched(_examples([0, 1], [0, 2], [0, 2, 1]), [1000, 10, 1])
    assert found.varying == {1, 2}
    scores = score(found, RepeatLast(), range(1, 3))
    assert scores.order == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert (scores.recall, scores.precision) == (1 / 3, 1 / 2)
    assert (scores.missed_bytes, scores.wasted_bytes) == (11 / 2, 10 / 2)
    assert math.isnan(scores.ahead)
    still = score(_watched(_examples([0], [0]), [1]), RepeatLast(), range(1, 2))
    assert still.order == 1
    assert math.isnan(still.recall)


def test_a_router_at_hand_is_not_scored(moe: Watched) -> None:
    """The hints of each step are about both layers as the first router is called, then about the
    second at hand; with all wrong at hand, nothing changes."""
    pilot = Pilot(moe.vocabulary)
    for example in moe.examples[:-1]:
        pilot.observe(example.sample, example.blocks)
        pilot.consolidate()
    last = moe.examples[-1]
    pilot.predict(last.sample)
    assert pilot.tracker is not None
    told = [copy.deepcopy(pilot.tracker).at_hand(hint.blocks) for hint in last.hints]
    assert told[:2] == [True, False]
    wrong = [
        replace(hint, values=tuple(1 - value for value in hint.values)) if at_hand else hint
        for hint, at_hand in zip(last.hints, (True, False, True), strict=True)
    ]
    shares = []
    for hints in (last.hints, wrong, ()):
        pilot.predict(last.sample)
        shares.append(one_ahead(pilot.tracker, replace(last, hints=hints)))
    assert shares[0] == shares[1]
    assert 0 < shares[0] < 1


def test_a_tracker_is_scored_on_real_steps(moe: Watched) -> None:
    steered = ablation._Steered(moe.vocabulary, packaged())
    scores = score(moe, steered, range(4, STEPS), steered.follow)
    assert 0 < scores.order < scores.ahead < 1
    assert scores.recall < 1
    assert scores.missed_bytes > 0


# The experiment


def test_every_predictor_is_scored_on_networks_of_families_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {key: SUBJECTS[key] for key in ("gan", "moe_8")}
    monkeypatch.setattr(ablation, "SUBJECTS", chosen)
    monkeypatch.setattr(material, "SUBJECTS", chosen)
    monkeypatch.setattr(ablation, "CASES", chosen)
    monkeypatch.setattr(general_training, "EPOCHS", 1)
    monkeypatch.setattr(general_training, "UPDATES", 1)
    path, folder = tmp_path / "learning.json", tmp_path / "watched"
    (tmp_path / "learning.md").write_text("<!-- table -->\n<!-- end of table -->\n")
    shared: dict[str, Any] = {"seeds": 1, "watched": 60, "material": 1, "jobs": 1}
    params = ablation.Params(sessions=(), recorded=16, folder=folder, **shared)
    result = carry_out(ablation.Ablation, params, path)
    scored = [row for row in result["rows"] if row["kind"] == "scores"]
    assert [row["network"] for row in scored] == ["gan", "moe_8"]
    cut = [row for row in result["rows"] if row["kind"] == "blocks"]
    assert [row["network"] for row in cut] == ["gan", "moe_8"]
    for row in cut:
        assert 0 < row[PLANNED]["blocks"] <= row[MODULES]["blocks"]
        assert 0 < row[MODULES]["order"] <= 1
    for row in scored:
        found = row["predictors"]
        assert (ablation.ORACLE in found) == (row["network"] == "moe_8")
        assert {*ablation.ROWS} - {*found} <= {ablation.ORACLE}
        for name, scores in found.items():
            assert 0 <= scores["early"] <= 1, name
            assert 0 < scores["late"] <= 1, name
        assert found["pilot"]["late"] > found["last order"]["late"]
        assert 0 <= row["silent"] < 1
        assert (row["foregone"] is None) == (row["silent"] == 0)
        assert found["pilot"]["slow_s"] >= found["pilot"]["latency_s"] > 0
    monkeypatch.setattr(material, "watch", lambda *_, **__: pytest.fail("watched again"))
    out = tmp_path / "general.safetensors"
    carry_out(GeneralPilot, general.Params(out=out, folder=folder, **shared))
    assert General.load(out).card["networks"] == ["gan", "gpt2", "moe_8"]
    assert "family left out: better than the last order in" in capsys.readouterr().out
    assert path.with_suffix(".svg").stat().st_size > 4000


def test_a_loss_at_every_seed_is_told_however_far_apart_the_seeds_are() -> None:
    def of(*values: float) -> dict[str, Any]:
        found = ablation._spread(values)
        assert found is not None
        return {"late": found}

    one = {"pilot": of(0.2, 0.5, 0.8), "other": of(0.22, 0.51, 0.82), "far": of(0.1, 0.6, 0.8)}
    assert ablation._sign(ablation._gain(one, "pilot", "other", "late")) == -1
    assert ablation._sign(ablation._gain(one, "other", "pilot", "late")) == 1
    assert ablation._sign(ablation._gain(one, "pilot", "far", "late")) == 0


def test_idioms_are_hidden_or_those_of_others(moe: Watched) -> None:
    blocks = moe.vocabulary.blocks
    assert ablation.coded(moe, ablation.IDIOMS, 0) is moe.vocabulary
    hidden = ablation.coded(moe, ablation.PILOT, 0).blocks
    assert not any(any(block.idioms) for block in hidden)
    shuffled = ablation.coded(moe, ablation.SHUFFLED, 0).blocks
    assert sorted(b.idioms for b in shuffled) == sorted(b.idioms for b in blocks)
    assert [b.idioms for b in shuffled] != [b.idioms for b in blocks]


def test_shapes_tell_blocks_apart_by_parameters_and_by_how_soon_they_run_again(
    moe: Watched,
) -> None:
    shaped = {b.path: tuple(b.idioms) for b in ablation.coded(moe, ablation.SHAPES, 0).blocks}
    router, expert = shaped["layers.0.moe.router"], shaped["layers.0.moe.experts.0.gate"]
    assert router == (64, 64, 2, 1, 32, len(moe.vocabulary))
    assert expert == shaped["layers.1.moe.experts.3.gate"] == (64, 10, *router[2:4], 8, router[5])


def test_ways_to_predict_take_turns_in_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (CONTROL, "on demand", "pilot, no routers", CLAIRVOYANT)
    ways = {way: POLICIES[way] for way in chosen}
    monkeypatch.setattr(ablation_sessions, "POLICIES", ways)
    case = Case("moe_8", "moe", "tiny-wide", {"length": 8}, "top-2 of 64")
    row = train_in_turns(Contest(case, 0.5), 1, Turns(1, 1, 2, 0), Path("/var/tmp"), _silent)
    assert row["repeatable"] is True
    assert row["budget_bytes"] == row["footprint_bytes"] // 2
    for way in ways:
        run = row["runs"][way]
        assert len(run["each_step_s"]) == 2
        if way == CONTROL:
            continue
        assert run["losses_equal"] is True
        assert 0 < run["peak_fast_bytes"] <= row["budget_bytes"]
        assert 0 <= run["predicting_share"] < 0.1
    assert row["runs"]["on demand"]["prefetched_bytes"] == 0
    assert row["runs"][CLAIRVOYANT]["accuracy"] == 1


def _silent(doing: str, done: int | None = None, total: int | None = None) -> None:
    """Report nothing."""
