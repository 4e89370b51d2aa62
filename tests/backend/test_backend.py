"""The backend itself: kernels have the CPU's bits, streams are late, memory is not the host's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import DEVICE, kernels, late
from exactness import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dynoffload.below_modes import call_below

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x @ y.T,
    "scalar": lambda x, y: x * 2 - 1,
    "in place": lambda x, y: x.clone().mul_(y).add_(1),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty(0, device=x.device)),
    "views": lambda x, y: x.t()[2:5].unfold(1, 2, 2).transpose(0, 1).contiguous(),
    "concatenated": lambda x, y: torch.cat([x, y[:3]]),
    "indexed": lambda x, y: x[(x > 0).nonzero()[:, 0]],
    "masked": lambda x, y: x[x > y],
    "sorted": lambda x, y: torch.sort(x, dim=1).values,
    "chosen": lambda x, y: x.topk(3).indices,
    "normalized": lambda x, y: F.layer_norm(x, [x.shape[1]]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "dropped": lambda x, y: F.dropout(x, 0.5),
    "drawn": lambda x, y: torch.randn(5, device=x.device) + x[0, 0],
    "autocast": lambda x, y: autocast(x, y),
    "half": lambda x, y: (x.half() @ y.half().T).float(),
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y).conj() * 2),
}


def autocast(x: Tensor, y: Tensor) -> Tensor:
    """Return a product in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        product = x @ y.T
    assert product.dtype is torch.bfloat16
    return product


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_below(func, args, kwargs or {})


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_bits_of_the_cpu(name: str) -> None:
    x, y = torch.randn(6, 16), torch.randn(6, 16)
    found = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(1)
        with late():
            found.append(OPERATORS[name](x.to(device), y.to(device)).cpu())
    assert_same(found[1], found[0], name)


def test_autocast_casts_the_products_of_an_operator_that_python_calls() -> None:
    x, y, weight = (torch.randn(*size).to(DEVICE) for size in [(8, 64), (8, 64), (16, 64, 64)])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = F.bilinear(x, y, weight)
        with Passing():
            found = F.bilinear(x, y, weight)
    assert_same(found.cpu(), expected.cpu(), "cast")
    assert not torch.equal(expected.cpu(), F.bilinear(x, y, weight).cpu())


def test_gradients_have_the_bits_of_the_cpu() -> None:
    found = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(3):
            x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: p.detach().cpu() for name, p in model.named_parameters()})
    assert_same(found[1], found[0], "parameters")


def test_the_host_goes_on_and_errors_come_later() -> None:
    x = torch.zeros(4, 4, device=DEVICE)
    before = kernels()
    with late(delay_us=100_000):
        for _ in range(64):
            x += 1
        done = torch.Event(DEVICE)
        done.record()
        assert not done.query()
        done.synchronize()
    assert kernels() - before >= 64
    assert x.cpu().eq(64).all()
    F.embedding(torch.tensor([7], device=DEVICE), x)
    with pytest.raises(IndexError):
        torch.accelerator.synchronize()


def test_what_failed_on_another_stream_is_thrown_and_settings_end() -> None:
    x, memory = torch.zeros(4, 4, device=DEVICE), torch.accelerator.get_memory_info()[1]
    with (
        pytest.raises(IndexError),
        late(memory=torch.accelerator.memory_reserved() + (8 << 20)),
        torch.Stream(DEVICE),
    ):
        F.embedding(torch.tensor([7], device=DEVICE), x)
    assert torch.accelerator.get_memory_info()[1] == memory


def test_copies_to_the_host_keep_conjugation() -> None:
    x, found = torch.randn(4, dtype=torch.complex64), torch.empty(4, dtype=torch.complex64)
    found.conj().copy_(x.to(DEVICE))
    assert_same(found, x.conj().resolve_conj(), "conjugated")


def test_another_stream_reads_what_was_there_before_unless_it_waits() -> None:
    x = torch.zeros(256, device=DEVICE)
    other = torch.Stream(DEVICE)
    seen = {True: 0, False: 0}
    for waits in seen:
        for seed in range(20):
            with late(seed, delay_us=30_000):
                source = torch.full((256,), float(seed + 1)).pin_memory()
                x.copy_(source, non_blocking=True)
                if waits:
                    other.wait_stream(torch.accelerator.current_stream())
                with other:
                    copied = x.clone()
                    seen[waits] += int(copied.cpu().eq(seed + 1).all())
                torch.accelerator.synchronize()
    assert seen[True] == 20
    assert seen[False] < 20


def test_memory_is_counted_limited_and_poisoned() -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with late(memory=torch.accelerator.memory_reserved() + (8 << 20)):
        x = torch.empty(6 << 20, dtype=torch.uint8, device=DEVICE)
        assert torch.accelerator.memory_allocated() - before == 6 << 20
        with pytest.raises(torch.OutOfMemoryError, match="has no 6291456 bytes left"):
            torch.empty(6 << 20, dtype=torch.uint8, device=DEVICE)
        x.zero_()
        storage = x.untyped_storage()
        storage.resize_(0)
        with pytest.raises(RuntimeError, match=r"not allocated|smaller than it"):
            x + 1
        storage.resize_(6 << 20)
        assert x.cpu().eq(0xFB).all()
    assert torch.accelerator.max_memory_allocated() - before == 6 << 20
    del x, storage
    assert torch.accelerator.memory_allocated() == before


def test_the_host_cannot_read_the_memory() -> None:
    """Not even by an address: that ends the process."""
    code = (
        "import ctypes, torch, accelerator\n"
        "x = torch.ones(4, device=accelerator.DEVICE)\n"
        "print('here', flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 16)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "here", run.stderr
    assert run.returncode == -11
