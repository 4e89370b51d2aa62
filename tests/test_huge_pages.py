"""Fresh memory on huge pages: what is asked for, and of which memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from dynoffload.doctor.system import read_huge_pages
from dynoffload.memory.huge import on_huge_pages
from dynoffload.moe.slices import Slices
from dynoffload.units import MiB

has_huge = pytest.mark.skipif(
    sys.platform != "linux" or read_huge_pages() in (None, "never"),
    reason="this system has no transparent huge pages, or they are switched off",
)


def is_asked_for(address: int) -> bool:
    """Return whether huge pages were asked for where an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("ascii", "replace").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:#x} lies nowhere")


@has_huge
def test_whole_huge_pages_of_a_large_tensor_are_asked_for() -> None:
    plain, asked = torch.empty(64 * MiB, dtype=torch.uint8), torch.empty(64 * MiB // 4)
    assert on_huge_pages(asked) is asked
    middle = asked.data_ptr() + asked.nbytes // 2
    assert is_asked_for(middle)
    assert not is_asked_for(plain.data_ptr() + plain.nbytes // 2)
    if asked.data_ptr() % (2 * MiB):
        assert not is_asked_for(asked.data_ptr()), "what lies around it is somebody else's"
    asked.fill_(3.0)
    assert bool((asked == 3.0).all())


@pytest.mark.parametrize("tensor", [torch.empty(4), torch.empty(0), torch.empty(4, device="meta")])
def test_others_stay_as_they_are(tensor: torch.Tensor) -> None:
    assert on_huge_pages(tensor) is tensor


@has_huge
def test_gradients_of_large_experts_lie_there() -> None:
    whole = torch.zeros(9, MiB, requires_grad=True)
    slices = Slices(whole)
    (slices[2].sum() + slices[7].sum()).backward()
    assert whole.grad is not None
    assert is_asked_for(whole.grad.data_ptr() + whole.grad.nbytes // 2)
    assert whole.grad.sum(1).tolist() == [float(MiB) * (row in (2, 7)) for row in range(9)]
