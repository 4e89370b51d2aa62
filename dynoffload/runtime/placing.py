"""Another tensor under the same parameter: how one comes from the meta device, and goes back.

``parameter.data = …`` is refused between devices, so the two are swapped. What users have noted on
a parameter, such as ``weight.no_decay = True``, is the object's and stays with it.
"""

from __future__ import annotations

import torch
from torch import nn


def put_in_place(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Have ``parameter`` hold ``data``, on another device."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]


def to_meta(parameter: nn.Parameter) -> None:
    """Have ``parameter`` be on the meta device, without values."""
    put_in_place(parameter, torch.empty_like(parameter, device="meta"))
