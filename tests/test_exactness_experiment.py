"""The experiment on exactness: its networks, its loops, and that it can find a difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dynoffload.experiments import exactness
from dynoffload.experiments.allowed import Allowed, budget_of
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.bits import first_difference, state_of
from dynoffload.experiments.exactness import Case, Exactness, Params, train_case
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.loops import OPTIMIZERS, Loop, loops
from dynoffload.experiments.processes import WorkerError

pytest.importorskip("transformers")

FEW = {
    "gpt2": Loop("AdamW foreach", accumulate=2, clip="norm"),
    "qwen3-moe": Loop("RMSprop centered", clip="value", autocast="bfloat16"),
    "jamba": Loop("AdamW fused", checkpointing="not reentrant"),
    "bart": Loop("SGD momentum", frozen="half"),
    "beit": Loop("Adafactor plain", clip="norm"),
    "wav2vec2": Loop("NAdam decoupled", autocast="float16"),
    "esmfold": Loop("transformers.Adafactor relative", frozen="embeddings"),
    "mixtral": Loop("AdamW foreach", clip="norm", weights="bfloat16"),
    "t5": Loop("AdamW fused", checkpointing="not reentrant"),
    "deit": Loop("AdamW foreach", checkpointing="reentrant"),  # its only inputs are pictures
}


@pytest.mark.parametrize("name", FEW)
def test_one_architecture_of_each_family(name: str) -> None:
    """Trained by one loop, under a quarter or three times the largest parameter."""
    loop = Loop(**{**vars(FEW[name]), "steps": 3})
    row = train_case(Case(name, loop, looks=name != "jamba"))
    assert row["exact"], row["why"]
    assert row["peak_fast_bytes"] <= row["budget"]
    assert row["bytes_in"] > 0, "nothing was paged"
    assert row["above_share"] == ""
    assert (row["recomputed"] > 0) == bool(loop.checkpointing)


def _allowed(case: Case) -> Allowed:
    model = exactness._network_of(case)
    return budget_of(model, case.loop.make_optimizer(model), case.backend)


CASES = exactness.cases_of(list(ARCHITECTURES), rounds=3, steps=5)
TIGHT = ("resnet", "beit", "albert", "mamba", "vit", "gemma2")


@pytest.mark.parametrize("name", TIGHT)
def test_a_share_is_enough_for_each_loop(name: str) -> None:
    """For networks whose largest parameter or small tensors take much of it."""
    for case in CASES:
        if case.architecture == name:
            assert _allowed(case).above_share == "", case


def test_a_case_above_its_share_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network of one layer, whose largest update is more than a quarter of all."""
    llama = ARCHITECTURES["llama"]
    one = replace(llama, options={**llama.options, "num_hidden_layers": 1, "hidden_size": 16})
    monkeypatch.setitem(ARCHITECTURES, "llama", one)

    class Here:  # this process, in place of another
        call = staticmethod(lambda function, *args: function(*args))
        close = staticmethod(lambda: None)

    monkeypatch.setattr(exactness, "Renewed", lambda *args, **kwargs: Here())
    result = carry_out(Exactness, Params(architectures=("llama",), rounds=1, steps=1))
    (row,), found = result["rows"], result["summary"]
    assert (found["cases"], found["exact"]) == (1, 1)
    assert (found["above_share"], found["within_a_quarter"]) == (1, 0)
    assert "needs" in row["above_share"]
    assert "at least" in row["above_share"]
    said = " ".join(capsys.readouterr().out.split())
    assert "is above its share: a budget of" in said
    assert "1 above a quarter of their need and three times their largest parameter" in said


def test_experts_run_by_the_implementation_that_is_named() -> None:
    """By transformers' own choice, or eagerly; the row says which, and where there are none."""
    loop = Loop("AdamW foreach", weights="bfloat16", steps=2)
    for experts, ran in (("", "grouped_mm"), ("eager", "eager")):
        row = train_case(Case("qwen3-moe", loop, looks=False, experts=experts))
        assert row["exact"], row["why"]
        assert row["experts"] == ran
    assert train_case(Case("gpt2", Loop("SGD momentum", steps=1), experts="eager"))["experts"] == ""


def test_checkpointing_is_tried_where_it_takes_effect() -> None:
    """Other networks have another habit in its place."""
    tried = list(Exactness(Params(rounds=7)).cases().values())
    checkpointed = {case.architecture for case in tried if case.loop.checkpointing}
    assert checkpointed == {name for name, one in ARCHITECTURES.items() if one.checkpoints}
    assert ARCHITECTURES.keys() - checkpointed >= {"albert", "resnet", "esmfold"}
    assert max(case.loop.accumulate for case in tried) == 3
    assert {case.experts for case in tried} == {"", "eager"}


def test_checkpointing_without_effect_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "prepare", lambda self, model: None)
    row = train_case(Case("gpt2", Loop("AdamW foreach", checkpointing="reentrant", steps=1)))
    assert not row["exact"]
    assert "nothing was recomputed" in row["why"]


def test_a_process_that_dies_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise WorkerError("'a case' was killed by signal 9")

    one = Exactness(Params())
    monkeypatch.setattr(one.processes, "call", dies)
    row = one.run(next(iter(one.cases().values())))
    assert (row["exact"], row["why"]) == (False, "'a case' was killed by signal 9")
    assert not one.settled(row)  # so that it is tried again


def test_the_loops_rotate_through_all_habits() -> None:
    row = loops(160)
    assert {loop.optimizer for loop in row} == set(OPTIMIZERS)
    for habit in ("accumulate", "clip", "autocast", "checkpointing", "frozen", "weights"):
        for optimizer in ("AdamW foreach", "SGD momentum"):
            met = {getattr(loop, habit) for loop in row if loop.optimizer == optimizer}
            assert len(met) > 1, f"{optimizer} always has the same {habit}"
    assert loops(5, first=7) == row[7:12]


def test_a_difference_of_one_bit_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    before = state_of(model, optimizer)
    assert first_difference(before, state_of(model, optimizer)) == ""
    with torch.no_grad():
        model.bias[1] = 0.0
    zero = state_of(model, optimizer)
    assert "parameters.bias" in first_difference(zero, before)
    with torch.no_grad():
        model.bias[1] = -0.0
    assert ": 1 of 3 elements" in first_difference(state_of(model, optimizer), zero)
    assert first_difference({"a": [1.0]}, {"a": [1]}) == ".a[0]: 1.0 is not 1"
    assert first_difference({"a": float("nan")}, {"a": float("nan")}) == ""


def test_a_wrong_result_is_a_failed_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network inside the block is told from the other by its hooks, and disturbed."""
    architecture = ARCHITECTURES["gpt2"]
    sample = type(architecture).sample

    def disturbed(self: object, model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
        inputs = sample(architecture, model, seed)
        if model._forward_pre_hooks and seed == 2:
            inputs["input_ids"] = inputs["input_ids"].flip(0)
        return inputs

    monkeypatch.setattr(type(architecture), "sample", disturbed)
    for looks in (True, False):
        row = train_case(Case("gpt2", Loop("AdamW foreach", steps=3), looks=looks))
        assert not row["exact"]
        assert "step 2" in row["why"]


def test_it_runs_by_name_and_writes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exactness.json"
    params = Params(architectures=("llama",), rounds=2, steps=2)
    result = carry_out(Exactness, params, path)
    assert json.loads(path.read_text()) == result
    assert (result["summary"]["cases"], result["summary"]["exact"]) == (2, 2)
    assert [row["backend"] for row in result["rows"]][-1] == "mapped"
    assert "2 of 2 cases of 1 architectures are exact" in capsys.readouterr().out
