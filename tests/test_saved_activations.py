"""What autograd saves is moved, and backward cannot tell.

Each graph is small and made for one way to use saved tensors; under the smallest budgets their
copies leave fast memory before backward asks for them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, Twin, footprint_of, least_budget, needs_pager
from fused_networks import paging_of
from hazards import Side, compared, each_paged_in_time, stepwise
from torch import Tensor, nn
from torch.optim import AdamW
from torch.testing._internal.two_tensor import TwoTensor

import dynoffload
from dynoffload.runtime.counting import parts_of
from dynoffload.runtime.session import Session

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
CONFIG = {"page_bytes": 4096, "min_paged_bytes": 1024}


class Root(nn.Module):
    """A module whose forward is a function of itself, three weights and the input."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def pair(body: Callable[[Any, Tensor], Tensor]) -> Twin:
    """Return two copies of a network."""
    torch.manual_seed(0)
    return Twin(Root(body), lambda p: AdamW(p, lr=1e-2))


@contextlib.contextmanager
def paged(
    twin: Twin, backend: str, wanted: int = 48 * 1024, **config: Any
) -> Iterator[tuple[Session, int]]:
    """Page the first copy under so many bytes, or the least; no step takes more."""
    config = {**CONFIG, "backend": backend, **config}
    budget, _ = least_budget(twin.model, twin.optimizer, wanted, config)
    with twin.paged(budget, pilot=None, config=config) as session:
        yield session, budget
        assert all(step.peak_fast_bytes <= budget for step in session.log.steps)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step, whose random numbers follow from it."""
    torch.manual_seed(step)
    return squared(model, torch.randn(64, 32))


def plain(m: Any, x: Tensor) -> Tensor:
    """Three layers."""
    return m.c(torch.tanh(m.b(torch.relu(m.a(x)))))


def read_through_data(m: Any, x: Tensor) -> Tensor:
    """A write that hides from autograd, and then what ``.data`` gives is saved."""
    y = m.a(x)
    before = m.b(y) * 0
    y.data.mul_(2)
    return before + m.b(y.data)


def in_a_wrapper(m: Any, x: Tensor) -> Tensor:
    """A tensor that has no storage of its own is saved."""
    y = m.a(x).sin()
    wrapped = TwoTensor(x, x.clone()) * TwoTensor(y, y)
    return m.b(y) + wrapped.a


def own_cast(m: Any, x: Tensor, *, by_view: bool) -> Tensor:
    """A cast that the user made is saved by its view and written through, or turned round."""
    h = m.a(x).double()
    w = m.b.weight.to(torch.float64)
    wt = w.t()
    gate = (h @ wt).detach().sum() * 1e-3
    with torch.no_grad():
        if by_view:
            wt[0].zero_()
        else:
            w.mul_(2)
    return ((nn.functional.linear(h, w) if by_view else h @ wt) * (1 + gate)).float()


def own_cast_by_address(m: Any, x: Tensor) -> Tensor:
    """A cast that the user made is looked at from the start of its storage."""
    w = m.b.weight.to(torch.float64)
    y = nn.functional.linear(m.a(x).double().sin(), w)
    return (y * torch.as_strided(w, (32,), (33,), 0)).float()


def squared(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss."""
    loss: Tensor = model(x).square().mean()
    return loss


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": plain,
    "views of one storage": lambda m, x: m.c(torch.cat([t.exp() for t in m.a(x).chunk(4, 1)], 1)),
    "transposed and strided": lambda m, x: m.b(
        m.a(x).t().contiguous().t()[::2] * m.a(x).t()[:, ::2].t()
    ),
    "expanded": lambda m, x: m.a(x) * m.b(x[:1]).expand(64, 32).sin(),
    "saved twice": lambda m, x: (lambda y: y * y + y.sigmoid() * y.tanh())(m.a(x)),
    "a slice of something large": lambda m, x: m.a(x).repeat(40, 1)[7:71].sin() * m.b(x).cos(),
    "larger than a chunk": lambda m, x: m.a(x).repeat(3, 1).sin().tanh()[:64],
    "complex": lambda m, x: torch.fft.fft(m.a(x)).abs() * m.b(x),
    "conjugated": lambda m, x: (torch.fft.fft(m.a(x)).conj() * torch.fft.fft(m.b(x))).abs(),
    "conjugated and transposed": lambda m, x: (torch.fft.fft(m.a(x)).mH @ m.b(x).cfloat()).abs(),
    "negated": lambda m, x: torch.fft.fft(m.a(x)).conj().imag * m.b(x),
    "part of something large, conjugated": lambda m, x: (
        torch.cat([torch.fft.fft(m.a(x))] * 3)[7:71].conj() * m.b(x)
    ).abs(),
    "through .data": read_through_data,
    "in a wrapper": in_a_wrapper,
    "sparse": lambda m, x: torch.sparse.mm((x * (x > 1)).to_sparse(), m.a(x)[:32]) + m.b(x),
    "an own cast with a view": partial(own_cast, by_view=False),
    "an own cast, written through its view": partial(own_cast, by_view=True),
    "an own cast, by address": own_cast_by_address,
    "half of it in double": lambda m, x: (m.a(x).double().exp() * m.b(x)).float(),
    "empty": lambda m, x: m.a(x) + m.b(x[:0]).exp().sum() * m.c(x),
}


@stepwise(
    each_paged_in_time,
    lambda body: Root(BODIES[body]),
    share=0.97,
    budgeted=lambda body: body not in ("in a wrapper", "sparse"),  # those are counted, and stay
)
@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_the_same(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.step(loss_of(model, step), optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_tensor_that_takes_the_whole_pool(backend: str) -> None:
    """The chunk that is being filled makes room for it."""

    def body(m: Any, x: Tensor) -> Tensor:
        small = torch.cat([m.a(part).exp() for part in x.split(16)])
        large = m.b(x).tanh().repeat(rows // 64 + 1, 1)[:rows].clone().sin()
        return m.c(small) + large[:64].cos()

    rows = 64
    twin = pair(body)
    with paged(twin, backend) as (session, _):
        paging = paging_of(session)
        rows = paging.device.capacity // (32 * 4)
        twin.train(squared, [torch.ones(64, 32)] * 3)
        assert paging.activations.saved_bytes >= paging.device.capacity
    twin.assert_same()


@stepwise(each_paged_in_time, lambda: Root(plain), share=0.97, aside=False)
def test_a_saved_tensor_that_the_user_keeps(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """``grad_fn._saved_*`` gives out what is saved; it stays what it was."""
    out = model(torch.randn(64, 32))
    model.kept = [*getattr(model, "kept", []), out.grad_fn._saved_mat1]
    side.step(out.square().mean(), optimizer)
    side.see("kept", model.kept)


def cast_twice(m: Any, x: Tensor) -> Tensor:
    """Weights that are used again after their casts were saved, and one that is tied."""
    y = m.a(x)
    for _ in range(3):
        y = m.b(m.a(y).sin())
    return m.c(nn.functional.linear(y, m.a.weight).float().exp().bfloat16())


@compared(each_paged_in_time)
def test_autocast_around_everything(side: Side) -> None:
    """Its casts, of old weights by then, outlast the block in which they were paged."""
    model = Root(cast_twice)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        with side.offload(model, optimizer, share=0.97):
            for step in range(3):
                side.step(loss_of(model, step), optimizer)
        side.see("loss", loss_of(model, 3))


# Operators that save the cast of a weight itself, where a linear layer saves a view of it.
CASTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: x @ m.a.weight @ m.b.weight @ m.c.weight,
    "matmul from the left": lambda m, x: (m.b.weight @ (m.a.weight @ x.t())).t() @ m.c.weight,
    "matmul and layers": lambda m, x: m.c(m.b(m.a(x)) @ m.b.weight) @ m.a.weight,
    "bmm": lambda m, x: torch.bmm(
        torch.bmm(x[None], m.a.weight[None]), torch.stack([m.b.weight])
    ).squeeze(0),
    "addmm": lambda m, x: torch.addmm(m.a.bias, m.b(x), m.c.weight),
    "convolution": lambda m, x: nn.functional.conv1d(
        nn.functional.conv1d(x[:, :, None], m.a.weight[:, :, None], m.a.bias),
        m.b.weight[:, :, None],
    ).squeeze(-1),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.a.weight) @ m.b.weight,
    "used again": lambda m, x: (x @ m.a.weight).sin() @ m.a.weight @ m.b.weight @ m.a.weight,
}


@stepwise(each_paged_in_time, lambda body: Root(CASTS[body]), share=0.97)
@pytest.mark.parametrize("body", CASTS)
def test_casts_that_operators_save_themselves(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """The cast moves to a place of its own in a chunk, and backward reads it there, once."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(lambda x: model(x).float() / 64, step)
        again = loss_of(lambda x: model(x).float() / 64, step + 50)
    side.step(loss + again, optimizer)


def test_disabled_hooks_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """What is saved then is out of reach, which one line says; `test_hooks_disabled` compares."""
    twin = pair(plain)
    with paged(twin, "mapped"), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        twin.train(squared, [torch.ones(64, 32)] * 2)
    assert caplog.text.count("saved-tensor hooks are disabled") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_a_table_leave_the_table_where_it_is(backend: str) -> None:
    """A sample that is some columns of all there is: the table is the user's, far larger than the
    budget, and is neither copied nor counted."""
    twin = pair(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))))
    table = torch.randn(2000, 80, generator=torch.Generator().manual_seed(0))
    with paged(twin, backend) as (_, budget):
        assert table.nbytes > 4 * budget
        twin.train(squared, [table[8 * step : 8 * step + 8, :32] for step in range(3)])
        x = table[:8, :32]
        saved = saved_by(twin.model(x), "_saved_mat1")
        assert x.data_ptr() in [one.data_ptr() for one in saved]
    twin.assert_same()


def saved_by(loss: Tensor, name: str) -> list[Tensor]:
    """Return what the nodes of a graph have saved by that name, as backward would get it."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        nodes += [inner for inner, _ in node.next_functions if inner is not None]
    return [getattr(node, name) for node in nodes if hasattr(node, name)]


LAST: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_row_does_not_keep_what_it_is_cut_from(backend: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).repeat(64, 1)
        LAST.append(weakref.ref(y.untyped_storage()))
        return y[0].exp().sum() + (y[1] * y[1]).sum()

    twin = pair(body)
    with paged(twin, backend, 1 << 20):
        for model in (twin.model, twin.reference):
            loss = model(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
            assert LAST[-1]() is None or model is twin.reference
            loss.backward()
    twin.assert_same()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_freed_before_the_first_parameter_leaves_the_plan(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A large result after the last parameter is gone when backward is planned, at the first."""
    twin = pair(lambda m, x: m.c(m.b(m.a(x))).repeat(6, 1).tanh())
    x = torch.randn(40, 32)
    with paged(twin, backend, 96 * 1024, policy="repeat") as (session, _):
        twin.train(squared, [x] * 4)
        assert session.stats["prefetched_bytes"].max() > 0  # on a busy machine prefetch may end
    twin.assert_same()
    assert "not planned" not in caplog.text


class Graphs(nn.Module):
    """Multiplies by one sparse matrix before each layer, its own or the sample's."""

    def __init__(self, matrix: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return ``[nodes, 32]`` for the same."""
        used = self.matrix if matrix is None else matrix
        for layer in self.layers:
            x = torch.sparse.mm(used, torch.tanh(layer(x)))
        return x


def sparse_matrix(layout: torch.layout) -> tuple[Tensor, int]:
    """Return a sparse matrix and the bytes of its storages."""
    dense = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    matrix = dense.to_sparse(layout=layout)
    return matrix, sum(part.untyped_storage().nbytes() for part in parts_of(matrix))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("own", [False, True])
def test_a_sparse_matrix_that_every_layer_saves_is_counted_once(
    layout: torch.layout, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As a buffer of the model it is counted as such, and not once more; as a sample's, the warning
    says what is large."""
    matrix, nbytes = sparse_matrix(layout)
    model = Graphs(matrix if own else None)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    budget = footprint_of(model) + (nbytes if own else 0)
    config = {**SMALL_PAGES, "step_aside": False}
    x = torch.randn(64, 32)
    with dynoffload.offload(model, optimizer, budget=budget, config=config) as session:
        for _ in range(3):
            (model(x) if own else model(x, matrix)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    peaks = [step.peak_fast_bytes for step in session.log.steps]
    assert max(peaks) <= budget + (0 if own else nbytes)
    told = "; the largest is a sparse tensor that autograd saves in or after module 'layers.0' with"
    assert (told in caplog.text) == (not own)


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_what_is_larger_than_the_pool(backend: str) -> None:
    """They alone are saved: what they were cut from is gone when forward is over, and no step takes
    more than the budget. Backward has the bits of the strides that they had."""
    twin = pair(wide)
    with paged(twin, backend, 128 * 1024) as (_, budget):
        for step in range(3):
            x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
            assert x.nbytes * 32 > 2 * budget
            for model, optimizer in twin.sides:
                loss = model(x).square().mean()
                assert LAST[-1]() is None or model is twin.reference
                loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        lie = [
            [(one.stride(), one.data_ptr() % 64) for one in saved_by(model(x), "_saved_self")]
            for model in (twin.model, twin.reference)
        ]
        assert lie[0] == lie[1]
        assert any(len(stride) == 2 and stride[0] == 1024 for stride, _ in lie[0])
    twin.assert_same()


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_that_are_written_after_they_were_saved(backend: str) -> None:
    """It is an error as ever, whether what they were cut from is held or not."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).repeat(1, 64)
        z = y[:, :32]
        product = (z * z).sum()
        y.mul_(2)
        return product

    twin = pair(body)
    with paged(twin, backend, 64 * 1024):
        for model in (twin.model, twin.reference):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(torch.randn(128, 32)).backward()


def wide(m: Any, x: Tensor) -> Tensor:
    """A network whose intermediate is wider than what autograd saves of it, by far."""
    y = torch.tanh(m.a(x)).repeat(1, 32)
    LAST.append(weakref.ref(y.untyped_storage()))
    z = y[:, 3:35]  # not aligned
    complex_ = torch.view_as_complex(y[:, 40:56].unflatten(1, (8, 2)))
    bits = (complex_.conj() * complex_).imag + complex_.conj().real
    rows = z[:, None, 5:9].expand(-1, 3, -1)
    return m.c(z * z) + m.b(z.exp()) + bits.sum() + (rows * rows).sum() + torch.mm(z, z.T).sum()
