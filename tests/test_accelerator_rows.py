"""Rows on an accelerator: what lies over one has no memory, and every operator gets its bytes.

Each operator here runs on tensors over a row and on plain ones with the same bytes, under a pool
that holds some slices only; results, and what was written, are compared bit for bit. The emulated
accelerator sees what operators really touch, below: never a row.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import opened
from emulated import DEVICE, accelerated
from exactness import Twin, assert_same, footprint_of
from fused_networks import PAGES, Chosen, chosen_loss, fused_of, mixtral, mixtral_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from dynoffload.errors import BackendError, BudgetError
from dynoffload.memory.accelerator.guarded import fit
from dynoffload.memory.accelerator.storages import RowStorage
from dynoffload.runtime.placing import put

PAGE = 4096
COUNT, ROWS, COLUMNS = 6, 32, 32  # slices of one page, in single precision

pytestmark = pytest.mark.timeout(60)


def on_row(device: Any, values: Tensor) -> Tensor:
    """Return a tensor over a new row with the bytes of ``values``, ``[slices, …]``."""
    row = device.allocate_row(sum(one.nbytes for one in values), values[0].nbytes)
    device.names.update({region: f"experts.up[{n}]" for n, region in enumerate(row)})
    made = fit(
        torch.empty(0, dtype=values.dtype).set_(
            device.row_storage(row), 0, values.size(), values.stride()
        )
    )
    for number, region in enumerate(row):
        if values[number].any():
            made[number].copy_(values[number])
        else:
            device.clear([region])
    return made


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Any]:
    """A device that holds nine pages: a row gathered, and three slices."""
    with opened("accelerator", 9 * PAGE, PAGE, tmp_path) as found:
        yield found


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what the rows of these tests hold: a slice of zeros among them."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(COUNT, ROWS, COLUMNS, generator=generator)
    made[2] = 0.0
    return made.to(dtype)


def other() -> Tensor:
    """Return a plain tensor of the same form."""
    return values().flip(0).contiguous() + 1


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    # within one slice
    "matrix": lambda w: torch.ones(5, COLUMNS) @ w[3].t(),
    "transposed": lambda w: w.transpose(1, 2)[4].sum(0),
    "a row of a slice": lambda w: w[1, 7] * 2,
    "into a slice": lambda w: w[4].mul_(3),
    "a slice into another": lambda w: w[4].copy_(w[1]),
    "out": lambda w: torch.add(torch.ones(ROWS, COLUMNS), 1, out=w[5]),
    "two of a row": lambda w: torch.stack([w[0], w[5]]),
    "bytes": lambda w: w[3].view(torch.uint8).sum(),
    # by slices
    "by element": lambda w: (w * 2 + 1).relu(),
    "with another": lambda w: w + other(),
    "for all": lambda w: w * torch.arange(float(COLUMNS)),
    "in place": lambda w: w.add_(other()).mul_(0.5),
    "zeros": lambda w: w.zero_(),
    "filled": lambda w: w.fill_(7),
    "copied": lambda w: w.copy_(other()),
    "cloned": lambda w: w.clone(),
    "double": lambda w: w.double(),
    "flat": lambda w: w.view(-1) - 1,
    "some slices": lambda w: w[1:4].neg(),
    "multiplied by minus": lambda w: w.mul_(-1.0),
    "multiplied by a tensor": lambda w: w.mul_(torch.tensor(0.5)),
    "multiplied by infinity": lambda w: w.mul_(float("inf")),
    # gathered
    "sum": lambda w: w.sum(),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "sorted": lambda w: w.view(-1).sort().values,
    "strange order": lambda w: w.permute(2, 0, 1).reshape(-1).cumsum(0),
    "columns": lambda w: w[:, :, 3].add_(1),
    "slices shifted": lambda w: w[1:].copy_(w[:-1].clone()),
    "indexed": lambda w: w[torch.tensor([1, 5, 1])],
    "masked": lambda w: w[w > 0],
    "put": lambda w: w.index_copy_(0, torch.tensor([3]), torch.ones(1, ROWS, COLUMNS)),
    "batched": lambda w: torch.bmm(w, w.transpose(1, 2)),
    "a slice on all": lambda w: w.sub_(w[1].clone()),
    "random": lambda w: (torch.manual_seed(5), w.uniform_())[1],
    # over lists
    "foreach": lambda w: torch._foreach_mul_([w, torch.ones(3)], 2.0),
    "foreach of views": lambda w: torch._foreach_add_(list(w), list(other())),
    "foreach clamps": lambda w: torch._foreach_clamp_max_([w], 0.25),
    "foreach norms": lambda w: torch._foreach_norm([w, w[1], torch.ones(3)]),
    "foreach makes": lambda w: torch._foreach_sqrt([w.abs(), w.abs()]),
    "foreach zeros": lambda w: torch._foreach_zero_([w, torch.ones(2)]),
    "unscaled": lambda w: torch._amp_foreach_non_finite_check_and_unscale_(
        [w], torch.zeros(()), torch.tensor(0.5)
    ),
    # of no bytes, and of few
    "none": lambda w: w[0:0] + 1,
    "none written": lambda w: w[COUNT:].add_(1),
    "one": lambda w: w[3, 2, 1].item(),
    "equal": lambda w: torch.equal(w, w.clone()),
    "like": torch.ones_like,
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_operators(device: Any, inference: bool) -> None:
    """In inference mode operators that are made of others arrive whole."""
    seen = 0
    for name, operator in OPERATORS.items():
        plain, mine = values(), on_row(device, values())
        with torch.inference_mode(inference):
            expected, result = operator(plain), operator(mine)
        assert_same(result, expected, name)
        if isinstance(expected, Tensor) and expected.untyped_storage()._cdata == (
            plain.untyped_storage()._cdata
        ):
            assert result.untyped_storage()._cdata == mine.untyped_storage()._cdata, name
            seen += 1
        for number in range(COUNT):
            assert_same(mine[number].clone(), plain[number], f"{name}: what is left")
        for region in device.owners(mine):
            del device.names[region]
            device.release(region)
    assert seen > 8, "results in place of what was given"


def test_tensors_stay_themselves(device: Any) -> None:
    """What is returned by an operator in place is what was given, and its version moves on."""
    w = on_row(device, values())
    part = w[3]
    before = w._version
    same = [part.add_(1) is part, w.mul_(2) is w, w.clamp_(-1, 1) is w, w.cumsum_(0) is w]
    assert same == [True] * 4
    assert part._version == w._version == before + 4
    assert part.view(-1)[3:].untyped_storage() is w.untyped_storage()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(device: Any, dtype: torch.dtype) -> None:
    """Slices of more and fewer elements, and vectors' ends."""
    length = PAGE // dtype.itemsize
    plain = torch.linspace(-2, 2, COUNT * length).to(dtype).view(COUNT, 1, length)
    mine = on_row(device, plain)
    for operator in (torch.exp, torch.sum, F.gelu, torch.rsqrt):
        assert_same(operator(mine), operator(plain), str(operator))
    assert_same(mine.addcmul_(mine, mine), plain.addcmul_(plain, plain), "in place")


def test_only_what_is_touched_comes(device: Any) -> None:
    """A slice for what touches a slice; none for views, zeros and what is clear."""
    w = on_row(device, values())
    others = [device.allocate(PAGE) for _ in range(9)]
    device.acquire(others)
    assert not set(device.resident()) - set(others)
    for region in others:
        device.release(region)
    before = device.counters().bytes_in
    parts = [w.transpose(1, 2), w.detach().view(-1), *w.unbind(0), w.as_strided((2,), (1,), 5)]
    assert len(parts) == COUNT + 3
    assert not device.resident()
    torch.ones(5, COLUMNS) @ w[3].t()
    assert device.resident() == [device.owner(w[3])]
    assert device.counters().bytes_in == before + PAGE
    torch.stack([w[0], w[5]]), torch._foreach_add_([w[1], w[4]], 1)  # not what lies between
    assert device.counters().bytes_in == before + 5 * PAGE
    before += 4 * PAGE
    w[2].sum()  # zeros
    assert device.counters().bytes_in == before + PAGE
    w.zero_()
    assert device.resident() == [device.owner(w[2])]  # it was zeros before
    assert all(device.is_clear(device.owners(w)))


def test_zeros_that_are_multiplied_stay_clear(device: Any) -> None:
    """As clipping does it; a factor that is not finite, or negative, changes them."""
    w = on_row(device, values())
    clear = [False, False, True, False, False, False]
    row = [device.owner(part) for part in w]
    torch._foreach_mul_([w], torch.tensor(0.25))
    w.mul_(0.5)
    assert device.is_clear(row) == clear
    w.mul_(-0.5)
    assert not any(device.is_clear(row))


def test_what_takes_too_much_at_once_is_told(tmp_path: Path) -> None:
    """It names the parameter, need and have, and leaves all as it is."""
    with opened("accelerator", 4 * PAGE, PAGE, tmp_path) as device:
        w = on_row(device, values())
        for wrong in (lambda: w.sum(), lambda: w.cumsum_(0), lambda: torch._foreach_norm([w])):
            with pytest.raises(
                BudgetError, match=r"aten.* on 6 slices of experts\.up .*24\.\d+ KiB.*raise the b"
            ):
                wrong()
        assert torch.zeros_like(w).shape == w.new_empty(w.shape).shape  # reads no byte
        w.mul_(2)  # by slices
        for number, part in enumerate(values()):
            assert_same(w[number].clone(), part * 2, "what is left")
        used = device.resident_bytes()
        assert used <= 4 * PAGE


def test_nothing_takes_an_address(device: Any) -> None:
    """Whoever goes past the dispatcher is told so, and reads no other bytes."""
    w = on_row(device, values())
    takers: tuple[Callable[[Tensor], Any], ...] = (
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.__array__,
        torch.utils.dlpack.to_dlpack,
        Tensor.share_memory_,
        lambda t: t.untyped_storage().resize_(9 * COUNT * PAGE),
        lambda t: t.untyped_storage()._share_fd_cpu_(),
    )
    for take in takers:
        for tensor in (w, w[3], w[3, 2]):
            with pytest.raises((RuntimeError, BackendError)):
                take(tensor)
    with torch._C._DisableTorchDispatch(), pytest.raises(RuntimeError):
        w[3].add_(1)  # in a thread that nobody listens to


def test_storages_give_copies(device: Any) -> None:
    """Python code that takes the storage gets the bytes, and leaves the row as it is."""
    plain, w = values(), on_row(device, values())
    storage = w.untyped_storage()
    assert isinstance(storage, RowStorage)
    assert storage.nbytes() == plain.nbytes
    for taken in (copy.deepcopy(w), storage.cpu(), storage.clone()):
        found = taken if isinstance(taken, Tensor) else torch.empty(0).set_(taken).view_as(plain)
        assert_same(found, plain, "copy")
        assert device.owner(found) == -1
    assert storage[4097] == plain.untyped_storage()[4097]
    assert storage.to(device="cpu") is storage
    storage[4097] = 5
    plain.untyped_storage()[4097] = 5
    storage.copy_(storage.cpu())
    assert_same(w.clone(), plain, "written by way of a copy")


def test_a_storage_is_known_by_its_address(device: Any) -> None:
    """As `save_pretrained` and safetensors tell tensors that share memory, also where that of one
    that left was given to the next."""
    held = [on_row(device, values()), on_row(device, values())]
    for _ in range(2):
        made = torch.empty(0)
        region = device.allocate(held[0].nbytes // 4)
        device.acquire([region])
        held.append(made.set_(device.storage(region)))
    addresses = [tensor.untyped_storage().data_ptr() for tensor in held]
    assert len({0, *addresses}) == 5
    assert addresses == [tensor.untyped_storage().data_ptr() for tensor in held]
    for tensor in held:
        assert tensor[0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_what_lies_over_a_row_is_shown_and_copied(device: Any) -> None:
    w, plain = nn.Parameter(torch.empty(0)), nn.Parameter(values())
    put(w, on_row(device, values()))
    assert isinstance(w, nn.Parameter)
    assert (repr(w), w.tolist()) == (repr(plain), plain.tolist())
    assert f"{w.detach()[1, 0, 0]:.2f}" == f"{plain.detach()[1, 0, 0]:.2f}"
    for made in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(made) is nn.Parameter
        assert_same(made, plain, "copied")


def test_sparse_tensors_of_several_slices_are_refused(device: Any) -> None:
    """They would outlive what was gathered; those of one slice lie over its region."""
    w = on_row(device, values())
    at = torch.arange(COUNT).view(1, COUNT)
    sparse = torch.sparse_coo_tensor(at[:, :4], w[1, 0, :4], (COUNT,), check_invariants=False)
    assert_same(sparse.to_dense()[:4].clone(), values()[1, 0, :4], "of a slice")
    with pytest.raises(BackendError, match=r"clone\(\) what it is made of"):
        torch.sparse_coo_tensor(at, w[:, 0, 0], (COUNT,), check_invariants=False)


# Sessions


def test_experts_that_are_not_hit_move_no_byte() -> None:
    """Over nine steps of AdamW, which in plain PyTorch changes all experts in each, and with
    clipping, which reads all gradients; `tests/test_slices.py` has more of it, slowly."""
    twin = Twin(Chosen(8), lambda p: AdamW(p, lr=1e-2))
    with (
        accelerated(),
        twin.paged(footprint_of(twin.model) // 5, device=DEVICE, config=PAGES) as session,
    ):
        assert fused_of(session).keys() == {"experts.up", "experts.down"}
        for number in range(9):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                chosen_loss(model, (number, [[1, 5], [5], [1, 6]][number % 3])).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        began = min(span.start for span in session.log.phases if span.step >= 5)
        moved = {one.region for one in session.log.transfers if one.start >= began and one.nbytes}
        assert session.stats["bytes_in"].iloc[5:].min() > 0, "everything fits: this shows nothing"
        experts = {name.partition("[")[2][0] for name in moved if name.startswith("experts.")}
        assert experts == {"1", "5", "6"}, moved
    twin.assert_same()


def test_what_a_block_leaves() -> None:
    """Views and old gradients that somebody holds stay what they are, beyond the block."""
    twin = Twin(Chosen(), lambda p: AdamW(p, lr=1e-2))
    held: dict[int, list[Any]] = {}
    with accelerated(), twin.paged(footprint_of(twin.model), device=DEVICE, config=PAGES):
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            chosen_loss(model, (0, [1, 4])).backward()
            up: Any = model.experts.up  # type: ignore[union-attr]
            held[id(model)] = [up.grad, up.detach()[4]]
            optimizer.step()
            optimizer.zero_grad()
    for model in (twin.model, twin.reference):
        with torch.no_grad():
            held[id(model)][1].mul_(2)
    assert_same(held[id(twin.model)], held[id(twin.reference)], "held")
    twin.assert_same()


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_experts_that_are_taken_all_at_once_are_warned_of(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin(mixtral(way), partial(AdamW, lr=1e-2))
    with accelerated(elsewhere=True), twin.paged(4 * footprint_of(twin.model), device=DEVICE):
        mixtral_loss(twin.model, 1)
    warned = "MixtralExperts runs its experts by 'grouped_mm'" in caplog.text
    assert warned == (way != "eager")
