"""Experts that are spread over processes have one checkpoint, of whole tensors.

Ranks meet over gloo; what each of them does is in `parallel_checkpoints`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import needs_pager
from gloo_ranks import run_ranks
from parallel_checkpoints import (
    Net,
    Whole,
    adamw,
    block,
    gapped,
    goes_on,
    held,
    is_spread,
    loads,
    refused,
    several,
    zeroed,
)
from safetensors.torch import load_file
from torch import Tensor, nn

import dynoffload
from dynoffload.checkpoint import loading
from dynoffload.checkpoint.peers import Peers
from dynoffload.checkpoint.tensors import Ordinary
from dynoffload.errors import CheckpointError

KINDS = {"plain": (False, False), "paged": (True, False), "replicas": (True, True)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all ranks save."""
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def of_two(place: Path) -> list[Any]:
    """What two ranks have found that have saved to ``two``, without a session."""
    return run_ranks(goes_on, 2, str(place / "two"), False, False)


@pytest.fixture(scope="module")
def of_four(place: Path) -> list[Any]:
    """What four ranks have found, two of which hold the same experts each."""
    (place / "several").mkdir()
    return run_ranks(several, 4, str(place / "several"))


@pytest.fixture(scope="module")
def of_one(place: Path) -> dict[str, Tensor]:
    """What one process has that has saved layers of one process to ``one``."""
    model, optimizer = trained(Whole())
    dynoffload.save_checkpoint(model, optimizer, place / "one")
    return held(model, optimizer)


@pytest.fixture(scope="module")
def not_saved(place: Path) -> list[Any]:
    """What two ranks say of what they refuse."""
    where = place / "refused" / "of-one"
    where.mkdir(parents=True)
    model, optimizer = trained(Whole(), torch.optim.Adafactor)
    dynoffload.save_checkpoint(model, optimizer, where / "factored")
    dynoffload.save_checkpoint(Whole(experts=8), None, where / "eight")
    return run_ranks(refused, 2, str(place / "refused"))


def trained(model: nn.Module, kind: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after two steps in this process, and its optimizer."""
    torch.manual_seed(5)
    optimizer = adamw(model) if kind is None else kind(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(9, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def joined(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the whole tensors of ranks that hold all experts, each some."""
    return {
        name: torch.cat([one[name] for one in ranks]) if is_spread(name) else tensor
        for name, tensor in ranks[0].items()
    }


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that all tensors have the same bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def check_ranks(ranks: Sequence[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    """Assert that each rank has its own of whole tensors, and all of the others."""
    for rank, found in enumerate(ranks):
        check_same(
            found,
            {
                name: tensor.chunk(len(ranks))[rank] if is_spread(name) else tensor
                for name, tensor in wanted.items()
            },
        )


def check_files(directory: Path, wanted: dict[str, Tensor]) -> None:
    """Assert that plain tools find whole tensors under the model's own names."""
    files = [load_file(directory / f"{stem}.safetensors") for stem in ("model", "optimizer")]
    check_same(files[0] | files[1], wanted)


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=needs_pager) for kind in ("paged", "replicas"))]
)
def test_a_run_goes_on_from_its_checkpoint(kind: str, place: Path, of_two: list[Any]) -> None:
    """Without a session, where experts are paged, and beside `DistributedDataParallel`."""
    ranks, where = of_two, place / "two"
    if kind != "plain":
        where = place / kind
        ranks = run_ranks(goes_on, 2, str(where), *KINDS[kind])
    for one in ranks:
        check_same(one["loaded"], one["saved"])
        assert torch.equal(*one["losses"])
        check_same(*one["end"])
    assert not torch.equal(*(one["saved"]["first.up"] for one in ranks)), "the same experts"
    check_files(where, joined([one["saved"] for one in ranks]))


@pytest.mark.parametrize(
    ("kind", "pages"), [(Whole, False), pytest.param(Net, True, marks=needs_pager)]
)
def test_one_process_loads_what_two_have_saved(
    kind: Any, pages: bool, place: Path, of_two: list[Any], tmp_path: Path
) -> None:
    """Into a group of one, and into layers of one process; and saves the same files."""
    model = Whole() if kind is Whole else Net(None)
    optimizer = adamw(model)
    with block(model, optimizer, pages):
        zeroed(model)
        dynoffload.load_checkpoint(model, optimizer, place / "two")
        check_same(held(model, optimizer), joined([one["saved"] for one in of_two]))
        dynoffload.save_checkpoint(model, optimizer, tmp_path / "again")
    for stem in ("model", "optimizer"):
        file = f"{stem}.safetensors"
        assert (tmp_path / "again" / file).read_bytes() == (place / "two" / file).read_bytes()


@needs_pager
def test_any_number_of_ranks_loads_what_two_or_one_have_saved(
    place: Path, of_two: list[Any], of_one: dict[str, Tensor]
) -> None:
    saved = {"two": joined([one["saved"] for one in of_two]), "one": of_one}
    for world, name in ((4, "two"), (2, "one")):
        for ranks in zip(*run_ranks(loads, world, str(place / name)), strict=True):
            check_ranks(ranks, saved[name])


def test_groups_that_hold_the_same_experts_save_them_once(place: Path, of_four: list[Any]) -> None:
    wanted = joined([one["saved"] for one in of_four[:2]])
    check_files(place / "several" / "run", wanted)
    check_ranks([one["loaded"] for one in of_four[:2]], wanted)
    check_ranks([one["loaded"] for one in of_four[2:]], wanted)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "rows",
            "parameter 'first.up', of experts 2 and on, which both hold, differs between ranks 1 "
            "and 3 of 4",
        ),
        (
            "state of rows",
            "optimizer state 'second.down.exp_avg', of experts 0 and on, which both hold, differs "
            "between ranks 0 and 2 of 4",
        ),
    ],
)
def test_what_several_ranks_hold_has_to_be_alike(what: str, told: str, of_four: list[Any]) -> None:
    for one in of_four:
        assert told in one["refused"][what]
        assert one["same"], "the checkpoint of before was touched"
        assert one["beside"] == ["run"]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("replica", "sum the gradients of replicated_parameters(), and of all else"),
        ("replica", "parameter 'first.router' differs"),
        ("state", "optimizer state 'first.router.exp_avg_sq' differs between ranks 0 and 1 of 2"),
        ("numbers", "what the optimizer has beside tensors differs between ranks 0 and 1 of 2"),
        ("factored", "optimizer state 'first.up.row_var' has shape [2, 128, 1], and its"),
        ("factored", "use an optimizer that keeps such, as AdamW and SGD do, or save without"),
        ("shards", "has shards of fully_shard and experts that are other ones on each rank"),
    ],
)
def test_what_cannot_be_in_common_is_refused(what: str, told: str, not_saved: list[Any]) -> None:
    for one in not_saved:
        assert told in one[what]
        assert not one["inner"], "a replica within is nothing to refuse"
        assert one["there"] == ["of-one"], "something was written"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("loaded factored", "has optimizer state 'first.up.row_var' of shape [4, 128, 1], where"),
        ("eight", "'first.up' (F32[8, 128, 32] there, F32[4, 128, 32] here)"),
    ],
)
def test_what_is_of_other_experts_is_not_loaded(what: str, told: str, not_saved: list[Any]) -> None:
    for one in not_saved:
        assert told in one[what]
        assert one["untouched"]


def test_a_buffer_that_differs_is_the_first_ranks_with_a_warning(
    place: Path, not_saved: list[Any]
) -> None:
    assert len(not_saved[0]["warned"]) == 1
    assert "buffer 'first.choice_bias' differs between ranks 0 and 1" in not_saved[0]["warned"][0]
    assert not_saved[1]["warned"] == []
    kept = load_file(place / "refused" / "buffers" / "model.safetensors")
    assert not kept["first.choice_bias"].any()


def test_rows_that_overlap_and_have_a_gap_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for said in run_ranks(gapped, 2, str(tmp_path)):
        assert "rows 2 to 3 of 'rows' are on two ranks" in said
    assert not list(tmp_path.iterdir())


def test_one_path_that_is_another_checkpoint_on_each_machine_is_refused(tmp_path: Path) -> None:
    class Two(Peers):
        """Answers for a second rank, whose checkpoint has another checksum."""

        world = 2

        def share(self, work: Callable[[], Any]) -> list[Any]:
            own = work()
            return [own, (own[0], own[1] + 1) if isinstance(own, tuple) else own]

    dynoffload.save_checkpoint(model := nn.Linear(2, 2), None, tmp_path / "last")
    with pytest.raises(CheckpointError, match=r"ranks 0 and 1 load two checkpoints, /.*/last"):
        loading.load(
            model,
            None,
            tmp_path / "last",
            extra=None,
            memory=Ordinary(),
            prepare=lambda: pytest.fail("nothing may change"),
            peers=Two(),
        )
