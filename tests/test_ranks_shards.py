"""Models that ``fully_shard`` has sharded over processes: their shards are regions.

Each test starts processes that meet over gloo on the CPU; see `shards_child` for what they do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dynoffload
from dynoffload.experiments.ranks_shards import Network, on_ranks, optimizer_of

pytest.importorskip("torch.distributed.fsdp", reason="torch without distributed")

HERE = str(Path(__file__).parent)
SCRIPT = f"import sys; sys.path.insert(0, {HERE!r}); import shards_child; shards_child.main()"
BUDGET = "8MiB"  # of a rank


def run(task: str, directory: Path, given: Any, *, world: int = 2) -> list[Any]:
    """Return what each of ``world`` processes returns of ``task``."""
    arguments = [task, str(directory), json.dumps(given)]
    place = directory / f"{task}{len(list(directory.iterdir()))}"
    return on_ranks(SCRIPT, arguments, place, world=world, timeout=120)


def check_exact(found: list[Any], cases: list[Any]) -> None:
    """Assert that every rank's runs of all cases are equal, and were paged."""
    for rank, results in enumerate(found):
        for case, result in zip(cases, results, strict=True):
            told = f"rank {rank}: {case}"
            assert result["losses"] and result["finite"], told
            assert result["differ"] == [] and result["compared"] > 20, told
            assert result["paging"] and result["bytes_in"] > 0, told


def test_experts_and_dropped_layers_train_bit_for_bit(tmp_path: Path) -> None:
    """Ranks on different paths within blocks, accumulation, clipping, uneven shards."""
    cases = [
        ({"network": "moe", "optimizer": "AdamW", "steps": 4}, {}, "8MiB"),
        (
            {"network": "layerdrop", "optimizer": "SGD", "accumulate": 2, "width": 193, "steps": 3},
            {},
            "4MiB",
        ),
        ({"network": "moe", "clip": 0.3, "width": 95, "steps": 3}, {"draft_share": 0.0}, "8MiB"),
    ]
    check_exact(run("exact", tmp_path, cases), cases)


def test_low_precision_and_one_reduction_a_step(tmp_path: Path) -> None:
    """FSDP's mixed precision; gradients that are accumulated whole, and reduced once."""
    wide = {"network": "dense", "width": 192, "steps": 3}
    cases = [
        ({**wide, "low": True, "accumulate": 2, "sync_last": True, "clip": 1.0}, {}, "6MiB"),
        ({**wide, "optimizer": "AdamW(fused)", "accumulate": 2}, {"rollback": True}, "6MiB"),
        (wide, {"backend": "mapped"}, "6MiB"),
    ]
    check_exact(run("exact", tmp_path, cases), cases)


@pytest.mark.slow
def test_other_optimizers_and_options(tmp_path: Path) -> None:
    """Every optimizer of torch that takes shards, and the options of a session."""
    wide = {"network": "dense", "width": 192, "steps": 3}
    names = ["Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "ASGD", "SGD"]
    cases: list[Any] = [({**wide, "optimizer": name}, {}, "4MiB") for name in names]
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
    cases.append(({"network": "moe", "low": True, "steps": 20}, {}, "8MiB"))
    check_exact(run("exact", tmp_path, cases), cases)


def test_three_ranks(tmp_path: Path) -> None:
    """A number that divides no dimension."""
    cases = [({"network": "moe", "steps": 3, "accumulate": 2}, {}, "6MiB")]
    check_exact(run("exact", tmp_path, cases, world=3), cases)


def test_shards_gradients_and_state_are_regions(tmp_path: Path) -> None:
    """They are paged and stay the same tensors; groups are the units, told before FSDP reads."""
    for found in run("regions", tmp_path, "9MiB"):
        assert len(found["paged"]) == 9  # the weights of four blocks, and of the first layer
        assert found["with gradient"] == found["states"] == found["paged"]
        assert found["own gradients"]  # and do not keep the buffer of their group
        assert found["same parts"] and found["left"] and found["resizable"]
        assert found["units"] == ["", *(f"blocks.{number}" for number in range(4))]
        assert found["anchored"] == 13 and not found["missed"]  # 5 units, and 8 uses in backward
        assert not found["behind"]  # every update is made by a hook, and none by an access
        assert found["saved"] < found["weights"] / 4  # whole weights are gathered anew, not saved
        assert found["peak"] <= found["budget"]
        assert found["whole"] == [1024, 256]
        assert found["after"]


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """It leaves the root gathered; a save looks through that."""
    for same, compared in run("evaluated", tmp_path, "6MiB"):
        assert same and compared == 28 * 4


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    """By name, with the remedy."""
    for said in run("refused", tmp_path, "64MiB"):
        for why, told in {
            "tensor parallel": "'weight' .*not by fully_shard alone.*without tensor parallelism",
            "offload policy": "'weight' .*CPUOffloadPolicy: leave offload_policy out",
            "meta": r"'weight' .*on the meta device: .*to_empty\(device='cpu'\)",
            "dtr": "policy='dtr' does not know the shards.*'on-demand'",
            "os-paging": "policy='os-paging' does not know the shards",
        }.items():
            with pytest.raises(ValueError, match=f"ConfigError: .*{told}"):
                raise ValueError(said[why])


def _content(directory: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint's tensors."""
    names = ("model*.safetensors", "optimizer*.safetensors", "*.index.json")
    return {p.name: p.read_bytes() for name in names for p in sorted(directory.glob(name))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of two ranks, and what they have after two steps more."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, run("saves", directory, "6MiB")


def test_a_run_goes_on_from_its_checkpoint(saved: tuple[Path, list[Any]]) -> None:
    """With the random numbers of each rank; under another budget, and under none."""
    directory, ends = saved
    assert all(end["paged"] for end in ends)
    for budget in ("9MiB", None):
        for rank, (end, found) in enumerate(zip(ends, run("resumes", directory, budget))):
            assert found["lr"] == end["lr"]
            different = [n for n, one in end["state"].items() if found["state"].get(n) != one]
            assert different == [], f"rank {rank}"
            assert len(found["state"]) == len(end["state"])
    assert _content(directory / "copy2") == _content(directory / "run")
    assert _content(directory / "copy2plain") == _content(directory / "run")


def test_checkpoints_load_at_another_world_size(saved: tuple[Path, list[Any]]) -> None:
    """At three, and in one process without FSDP: each saves the same bytes again."""
    directory, _ = saved
    content = _content(directory / "run")
    assert sum(name.startswith("model-") for name in content) > 1  # several files
    run("resumes", directory, "5MiB", world=3)
    assert _content(directory / "copy3") == content
    model = Network("moe", 97)
    optimizer = optimizer_of("AdamW", model)
    dynoffload.load_checkpoint(model, optimizer, directory / "run")
    dynoffload.save_checkpoint(model, optimizer, directory / "one", max_shard_size="1MB")
    assert _content(directory / "one") == content
    weights: dict[str, torch.Tensor] = {}
    for path in (directory / "run").glob("model-*.safetensors"):
        weights |= load_file(path)
    Network("moe", 97).load_state_dict(weights)  # under the model's own names, whole
    run("resumes", directory, "6MiB", world=1)
    assert _content(directory / "copy1") == content


def test_what_one_process_saved_loads_into_shards(tmp_path: Path) -> None:
    """The other way round."""
    torch.manual_seed(3)
    model = Network("moe", 97)
    optimizer = optimizer_of("AdamW", model)
    model(torch.randn(4, 97)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dynoffload.save_checkpoint(
        model, optimizer, tmp_path / "run", extra={"scheduler": scheduler}, max_shard_size="1MB"
    )
    run("resumes", tmp_path, "6MiB")
    assert _content(tmp_path / "copy2") == _content(tmp_path / "run")


def test_a_rank_that_fails_tells_the_others(tmp_path: Path) -> None:
    """In every part of a save and a load; what was saved before stays, and nothing is touched."""
    first, second = run("faults", tmp_path, BUDGET)
    assert "rank 1 of 2 has failed" in first["save"] and "state_dict" in first["save"]
    assert second["save"].startswith("ConfigError") and "state_dict" in second["save"]
    assert "rank 1 of 2 has failed" in first["disk"] and "File too large" in first["disk"]
    assert "cannot save" not in first["load"] and "rank 1 of 2 has failed" in first["load"]
    assert "nowhere" in second["load"]
    for found in (first, second):
        assert found["kept"] and found["untouched"] and found["loaded"]
        assert found["leftovers"] == []
        assert "other names, shapes or dtypes" in found["unlike"]
        assert found["seconds"] < 20


def test_a_rank_that_ends_does_not_hang_the_others(tmp_path: Path) -> None:
    """They are told that it does not answer."""
    said = run("dies", tmp_path, BUDGET)[0]
    assert said.startswith("CheckpointError: rank 0 of 2 waits") and "do not answer" in said
    assert not (tmp_path / "alone").exists()


def test_replicas_are_saved_once_and_loaded_by_all(tmp_path: Path) -> None:
    """The first rank writes; the names are those of the model inside."""
    for found in run("replicas", tmp_path, BUDGET):
        assert found["same"] and found["count"] > 20
    model = Network("dense", 32)
    dynoffload.load_checkpoint(model, torch.optim.AdamW(model.parameters()), tmp_path / "replicas")
