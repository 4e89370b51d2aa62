"""Models that ``fully_shard`` has sharded over processes: their shards are regions.

The processes meet over gloo on the CPU: `shards_ranks` and `shards_checkpoints` say what each does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import shards_checkpoints
import shards_ranks
import torch
from gloo_ranks import run_ranks
from safetensors.torch import load_file
from shards_ranks import Network, optimizer_of

import dynoffload

pytest.importorskip("torch.distributed.fsdp", reason="torch without distributed")

TIMEOUT = 600.0  # seconds for all that a group of processes does
WIDE = {"network": "dense", "width": 192, "steps": 3}
CASES: list[Any] = [
    ({"network": "moe", "clip": 0.3, "width": 95, "steps": 4}, {}, "8MiB"),
    (
        {"network": "layerdrop", "optimizer": "SGD", "accumulate": 2, "width": 193, "steps": 3},
        {},
        "4MiB",
    ),
    (
        {**WIDE, "low": True, "accumulate": 2, "sync_last": True, "clip": 1.0},
        {"backend": "mapped"},
        "6MiB",
    ),
]


def run(task: Any, place: Path, value: Any = None, *, world: int = 2, **only: Any) -> list[Any]:
    """Return what a function of a directory and a value returns in each of ``world`` processes."""
    return run_ranks(shards_ranks.run, world, task, place, value, limit_s=TIMEOUT, **only)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint of two ranks is."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def ends(place: Path) -> list[Any]:
    """How two ranks end that save a checkpoint on their way."""
    return run(shards_checkpoints.saves, place, "6MiB")


def check_exact(place: Path, cases: list[Any], *, world: int = 2) -> None:
    """Assert that every rank's runs of all cases are equal, and were paged."""
    for rank, results in enumerate(run(shards_ranks.exact, place, cases, world=world)):
        for case, result in zip(cases, results, strict=True):
            told = f"rank {rank}: {case}"
            assert result["losses"], told
            assert result["finite"], told
            assert result["differ"] == [], told
            assert result["compared"] > 20, told
            assert result["bytes_in"] > 0, told


def test_shards_train_bit_for_bit(tmp_path: Path) -> None:
    """Ranks on different paths within blocks, accumulation, clipping, uneven shards, bfloat16."""
    check_exact(tmp_path, CASES)


def test_three_ranks(tmp_path: Path) -> None:
    """A number of ranks that divides no dimension."""
    cases: list[Any] = [({"network": "moe", "steps": 3, "accumulate": 2}, {}, "6MiB")]
    check_exact(tmp_path, cases, world=3)


@pytest.mark.slow
def test_other_optimizers_and_options(tmp_path: Path) -> None:
    """Every optimizer of torch that takes shards, and the options of a session."""
    names = ["Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "ASGD", "SGD"]
    cases: list[Any] = [({**WIDE, "optimizer": name}, {}, "4MiB") for name in names]
    cases += [
        ({"network": "moe", "steps": 3}, config, "8MiB")
        for config in (
            {"policy": "on-demand"},
            {"policy": "repeat"},
            {"defer_updates": "never"},
            {"page_activations": False},
            {"debug": True},
        )
    ]
    cases += [
        ({"network": "moe", "low": True, "steps": 20}, {}, "8MiB"),
        ({"network": "moe", "steps": 4, "ahead": True}, {}, "8MiB"),
        ({**WIDE, "optimizer": "AdamW(fused)", "accumulate": 2}, {"rollback": True}, "6MiB"),
        ({**WIDE, "optimizer": "Muon"}, {}, "4MiB"),
        ({**WIDE, "optimizer": "Muon", "clip": 0.5}, {}, "4MiB"),
        ({**WIDE, "optimizer": "Muon", "steps": 6, "width": 193}, {"rollback": True}, "4MiB"),
        ({**WIDE, "accumulate": 3, "sync_last": True, "stay": True}, {}, "6MiB"),
    ]
    check_exact(tmp_path, cases)


@pytest.mark.slow
def test_late_gradients(tmp_path: Path) -> None:
    """What a list of shards does together."""
    for one in run(shards_ranks.late, tmp_path, "600KiB"):
        assert one["losses"]
        assert (one["differ"], one["compared"]) == ([], 16)


@pytest.mark.slow
def test_memory_is_the_budget_and_what_fsdp_has_beside_it(tmp_path: Path) -> None:
    """A process grows by its budget, freed memory, and about what the plan line says of FSDP."""
    for one in run(shards_ranks.memory, tmp_path, "120MiB"):
        assert one["states"] > 2 * one["budget"]
        assert one["fast"] <= one["budget"]
        assert one["growth"] <= one["budget"] + one["slack"] + 1.25 * one["beside"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"mesh": [2, 1]}, {"mesh": [1, 2]}, {"columns": True, "width": 96}]
)
def test_replicas_of_shards_and_shards_of_columns(tmp_path: Path, options: dict[str, Any]) -> None:
    """Meshes of two dimensions, and parts that are no rows; a checkpoint is the same as ever."""
    cases: list[Any] = [({"network": "moe", "steps": 3, "clip": 0.5, **options}, {}, "8MiB")]
    check_exact(tmp_path, cases)
    given = ["10MiB", options]
    assert run(shards_checkpoints.saves, tmp_path, given) == run(
        shards_checkpoints.resumes, tmp_path, given
    )
    assert content(tmp_path / "copy2") == content(tmp_path / "run")
    model = Network("moe", options.get("width", 97))
    optimizer = optimizer_of("AdamW", model)
    dynoffload.load_checkpoint(model, optimizer, tmp_path / "run")
    dynoffload.save_checkpoint(model, optimizer, tmp_path / "one", max_shard_size="1MB")
    assert content(tmp_path / "one") == content(tmp_path / "run")


def test_shards_are_regions_and_stay_the_same_tensors(tmp_path: Path) -> None:
    for one in run(shards_ranks.regions, tmp_path, "9MiB"):
        assert len(one["paged"]) == 9  # the weights of four blocks, and of the first layer
        assert one["own gradients"]  # and do not keep the buffer of their group
        assert one["same parts"]
        assert one["saved"] < one["weights"] / 4  # whole weights are gathered anew, not saved
        assert one["peak"] <= one["budget"]
        assert one["whole"] == [1024, 256]
        assert one["after"]


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """It leaves the root gathered, and a save looks through that; shards that get other memory in
    mid-run train on."""
    for one in run(shards_ranks.evaluated, tmp_path, "6MiB"):
        assert one["losses"]
        assert (one["differ"], one["compared"]) == ([], 28 * 4)


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    """By name, with the remedy."""
    words = {
        "tensor parallel": "'weight' .*not by fully_shard alone.*without tensor parallelism",
        "offload policy": "'weight' .*CPUOffloadPolicy: leave offload_policy out",
        "meta": r"'weight' .*on the meta device: .*to_empty\(device='cpu'\)",
    }
    for said in run(shards_ranks.refused, tmp_path, "64MiB"):
        for what, told in words.items():
            assert re.match(f"ConfigError: .*{told}", said[what]), said[what]


# Checkpoints


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint's tensors."""
    names = ("model*.safetensors", "optimizer*.safetensors", "*.index.json")
    return {p.name: p.read_bytes() for name in names for p in sorted(directory.glob(name))}


@pytest.mark.parametrize(("budget", "copy"), [("9MiB", "copy2"), (None, "copy2plain")])
def test_a_run_goes_on_from_its_checkpoint(
    place: Path, ends: list[Any], budget: str | None, copy: str
) -> None:
    """With the random numbers of each rank; under another budget, and under none."""
    for end, other in zip(ends, run(shards_checkpoints.resumes, place, budget), strict=True):
        assert end["paged"]
        assert (other["state"], other["lr"]) == (end["state"], end["lr"])
    assert content(place / copy) == content(place / "run")


@pytest.mark.usefixtures("ends")
def test_three_ranks_load_what_two_have_saved(place: Path) -> None:
    """And save the same bytes again, in several files."""
    found = run(shards_checkpoints.resumes, place, "5MiB", world=3)
    copy = content(place / "copy3")
    assert sum(name.startswith("model-") for name in copy) > 1
    assert copy == content(place / "run")
    assert len({rank["lr"][0] for rank in found}) == 1


@pytest.mark.usefixtures("ends")
def test_one_process_loads_what_two_have_saved(place: Path, tmp_path: Path) -> None:
    """Without FSDP: under the model's own names, whole, and the same bytes again."""
    model = Network("moe", 97)
    optimizer = optimizer_of("AdamW", model)
    dynoffload.load_checkpoint(model, optimizer, place / "run")
    dynoffload.save_checkpoint(model, optimizer, tmp_path / "one", max_shard_size="1MB")
    assert content(tmp_path / "one") == content(place / "run")
    weights: dict[str, torch.Tensor] = {}
    for path in (place / "run").glob("model-*.safetensors"):
        weights |= load_file(path)
    Network("moe", 97).load_state_dict(weights)


def test_what_one_process_saved_loads_into_shards(tmp_path: Path) -> None:
    """The other way round."""
    torch.manual_seed(3)
    model = Network("moe", 97)
    optimizer = optimizer_of("AdamW", model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    extra = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
    dynoffload.save_checkpoint(
        model, optimizer, tmp_path / "run", extra=extra, max_shard_size="1MB"
    )
    assert len(run(shards_checkpoints.resumes, tmp_path, "6MiB")) == 2
    assert content(tmp_path / "copy2") == content(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("ends")
def test_one_rank(place: Path) -> None:
    """Its shards are whole, and its checkpoints the same."""
    cases: list[Any] = [({"network": "moe", "steps": 3}, {}, "14MiB")]
    check_exact(place, cases, world=1)
    run(shards_checkpoints.resumes, place, "14MiB", world=1)
    assert content(place / "copy1") == content(place / "run")


def test_a_rank_that_fails_tells_the_others(tmp_path: Path) -> None:
    """In every part of a save and a load; what was saved before stays, and nothing is touched."""
    first, second = run(shards_checkpoints.faults, tmp_path)
    assert second["save"].startswith("ConfigError")
    path = re.escape(str(tmp_path / "faulty"))
    assert re.search(
        rf"rank 1 of 2 in checkpoint {path} .*too large.*raise the limit", second["disk"]
    )
    assert second["load"].startswith("ConfigError")
    for one in (first, second):
        assert "ranks 0 and 1 name two directories, " in one["elsewhere"]
        assert "nowhere: a checkpoint is one for all ranks" in one["elsewhere"]
    for said in ("save", "disk", "load"):
        assert "rank 1 of 2 has failed, and so have all: " in first[said]
        assert second[said].partition(": ")[2][:100] in first[said]
    for one in (first, second):
        assert one["kept"]
        assert one["untouched"]
        assert one["loaded"]
        assert one["leftovers"] == []
        assert "other names, shapes or dtypes" in one["unlike"]
        assert one["seconds"] < 60


def test_a_rank_that_ends_does_not_hang_the_others(tmp_path: Path) -> None:
    """They are told that it does not answer."""
    (said,) = run(shards_checkpoints.dies, tmp_path, only=(0,))
    assert said.startswith("CheckpointError: rank 0 of 2")
    assert " waits for the other ranks, which do not answer (" in said
    assert not (tmp_path / "alone").exists()


def test_replicas_are_saved_once_and_loaded_by_all(tmp_path: Path) -> None:
    """The first rank writes; the names are those of the model inside."""
    for one in run(shards_checkpoints.replicas, tmp_path):
        assert one["same"]
        assert one["count"] > 20
    model = Network("dense", 32)
    dynoffload.load_checkpoint(model, torch.optim.AdamW(model.parameters()), tmp_path / "replicas")
