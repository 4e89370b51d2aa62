"""A dispatch mode that calls operators by `call_below` changes no bit of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.below_modes import call_below, refuse_by_mode
from dynoffload.errors import DynOffloadError


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return call_below(func, args, kwargs or {})


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_by_mode(func, args)
        return call_below(func, args, kwargs or {})


class Excluding(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def both(first: Callable[[], Any]) -> Iterator[None]:
    with first(), torch.autocast("cpu", torch.bfloat16):
        yield


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: both(torch.enable_grad),
    "autocast no_grad": lambda: both(torch.no_grad),
    "autocast inference": lambda: both(torch.inference_mode),
}

torch.manual_seed(0)
X = torch.randn(2, 8, 64)
IMAGE = torch.randn(2, 3, 9, 9)
LINEAR, WIDE, PAIRS = nn.Linear(64, 64), nn.Linear(64, 192), nn.Bilinear(64, 64, 16)
LAYER = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).eval()

OPERATORS: Mapping[str, Callable[[], Tensor]] = {
    "linear": lambda: LINEAR(X),
    "linear of a transposed batch": lambda: WIDE(X.transpose(0, 1)),
    "bilinear": lambda: PAIRS(X, X),
    "einsum": lambda: torch.einsum("abi,ij,abj->ab", X, LINEAR.weight, X),
    "tensordot": lambda: torch.tensordot(X, LINEAR.weight, dims=1),
    "multi_dot": lambda: torch.linalg.multi_dot([X[0], LINEAR.weight, LINEAR.weight]),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X),
    "layer_norm": lambda: F.layer_norm(X, (64,)),
    "interpolate": lambda: F.interpolate(IMAGE, scale_factor=1.7, mode="bilinear"),
    "a transform of a conjugate": lambda: torch.fft.hfftn(IMAGE),
    "narrow": lambda: LINEAR.weight.narrow(0, 3, 5),
    "chunk": lambda: LINEAR.weight.chunk(3)[1],
    "an encoder's layer": lambda: LAYER(X),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_no_bit_changes(name: str, mode: str) -> None:
    no_bit_changes(mode, OPERATORS[name])


def no_bit_changes(mode: str, call: Callable[[], Tensor], below: Any = Passing) -> None:
    with MODES[mode]():
        plain = call()
        with below():
            found = call()
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)
    assert found.requires_grad == plain.requires_grad
    assert found.is_inference() == plain.is_inference()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("linear of a transposed batch", "inference"),
        ("bilinear", "autocast"),
        ("einsum", "autocast inference"),
        ("a transform of a conjugate", "inference"),
    ],
)
def test_a_mode_that_calls_them_by_themselves_changes_some(name: str, mode: str) -> None:
    """So the test above can fail; once torch has mended it, `call_below` may go."""
    with MODES[mode]():
        plain = OPERATORS[name]()
        with Excluding():  # type: ignore[no-untyped-call]
            assert not torch.equal(OPERATORS[name](), plain)


NEEDS_GRADIENT = torch.randn(4, 4, requires_grad=True)
SYMMETRIC = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).fill_diagonal_(3)


def tangent_of(call: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(SYMMETRIC, torch.ones_like(SYMMETRIC)))
        return forward_ad.unpack_dual(out).tangent.clone()


def gradient_with_graph(call: Callable[[Tensor], Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(call(NEEDS_GRADIENT).sum(), NEEDS_GRADIENT, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), NEEDS_GRADIENT)[0]


BY_MODE: Mapping[str, tuple[str, Callable[[], Any], str]] = {
    "prod": ("grad", lambda: NEEDS_GRADIENT.prod().backward(), r"gradient of prod\(\)"),
    "prod of rows": (
        "grad",
        lambda: NEEDS_GRADIENT.prod(-1).sum().backward(),
        r"gradient of prod\(\)",
    ),
    "max": ("grad", lambda: NEEDS_GRADIENT.max().backward(), r"gradient of max\(\)"),
    "median": ("grad", lambda: NEEDS_GRADIENT.median().backward(), r"median\(\)"),
    "masked_fill": (
        "grad",
        lambda: SYMMETRIC.masked_fill(SYMMETRIC > 0, NEEDS_GRADIENT.sum()).sum().backward(),
        r"masked_fill\(\)'s value",
    ),
    "svdvals": ("no_grad", lambda: torch.linalg.svdvals(NEEDS_GRADIENT), r"svdvals\(\)"),
    "no gradient wanted": ("grad", lambda: torch.linalg.svdvals(SYMMETRIC), r"svdvals\(\)"),
    "cond": ("no_grad", lambda: torch.linalg.cond(SYMMETRIC), r"cond\(\)"),
    "nuclear norm": ("no_grad", lambda: torch.linalg.norm(SYMMETRIC, "nuc"), "nuclear norm"),
    "eigvalsh": ("no_grad", lambda: torch.linalg.eigvalsh(SYMMETRIC), r"eigvalsh\(\)"),
    "tangent of prod": ("no_grad", lambda: tangent_of(lambda x: x.prod(-1)), "aten.prod.dim_int"),
    "tangent of a norm": (
        "grad",
        lambda: tangent_of(lambda x: F.layer_norm(x, (4,))),
        "forward-mode differentiation of aten.native_layer_norm",
    ),
    "det twice": ("grad", lambda: gradient_with_graph(torch.linalg.det), r"det\(\) with create_"),
    "lstsq twice": (
        "grad",
        lambda: gradient_with_graph(lambda x: torch.linalg.lstsq(x, SYMMETRIC).solution),
        r"lstsq\(\) with create_",
    ),
    "pinv": ("autocast", lambda: torch.linalg.pinv(SYMMETRIC), r"pinv\(\) under autocast"),
}


@pytest.mark.parametrize("name", BY_MODE)
def test_what_a_mode_would_change_is_refused(name: str) -> None:
    mode, call, named = BY_MODE[name]
    with MODES[mode]():
        call()
        with Refusing(), pytest.raises(DynOffloadError, match=named) as caught:  # type: ignore[no-untyped-call]
            call()
    assert "torch chooses its kernel by whether its tensors call Python" in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        ("grad", lambda: NEEDS_GRADIENT.prod()),
        ("grad", lambda: torch.eq(NEEDS_GRADIENT, NEEDS_GRADIENT.max())),
        ("grad", lambda: NEEDS_GRADIENT.max(0).values),
        ("grad", lambda: tangent_of(lambda x: LINEAR(x.repeat(1, 16)).softmax(-1))),
        ("grad", lambda: tangent_of(lambda x: torch.linalg.norm(x, dim=-1))),
        ("grad", lambda: torch.autograd.grad(torch.linalg.det(NEEDS_GRADIENT), NEEDS_GRADIENT)[0]),
        ("grad", lambda: NEEDS_GRADIENT.masked_fill(SYMMETRIC > 0, 1.0)),
        ("grad", lambda: SYMMETRIC.prod(-1)),
        ("grad", lambda: torch.linalg.svdvals(NEEDS_GRADIENT)),
        ("grad", lambda: torch.linalg.eigvalsh(NEEDS_GRADIENT)),
        ("no_grad", lambda: torch.linalg.svd(SYMMETRIC)[1]),
        ("no_grad", lambda: torch.linalg.pinv(SYMMETRIC)),
        ("inference", lambda: torch.linalg.svdvals(SYMMETRIC)),
        ("inference", lambda: torch.linalg.eigvalsh(SYMMETRIC)),
        ("inference", lambda: torch.linalg.cond(SYMMETRIC)),
    ],
)
def test_what_it_would_not_change_is_not(mode: str, call: Callable[[], Tensor]) -> None:
    no_bit_changes(mode, call, Refusing)
