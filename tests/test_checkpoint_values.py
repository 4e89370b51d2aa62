"""Values that are not tensors survive encoding to JSON and decoding."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynoffload.checkpoint.values import decode, encode


def there_and_back(value: Any) -> Any:
    """Return a value encoded as JSON text and decoded again."""
    kept: dict[str, Tensor] = {}

    def put(path: str, tensor: Tensor) -> dict[str, Any]:
        kept[path] = tensor
        return {"$": "tensor", "name": path}

    text = json.dumps(encode(value, "value", put), allow_nan=False)
    return decode(json.loads(text), lambda said: kept[said["name"]])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())


VALUES = st.recursive(
    LEAVES | st.complex_numbers(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["$", "a"]), inner)  # "$" is reserved
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALUES)
def test_values_come_back_as_themselves(value: Any) -> None:
    """Types and values survive, as of -0.0, NaN, infinity and keys that are not strings."""
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter([1, 1, 2]),
        {1, 2},
        np.float32(0.1),
        np.bool_(True),
        np.int64(-3),
        -math.inf,
        np.arange(6).reshape(2, 3),
        np.zeros((0, 2)),
        np.array(1 + 2j),
        np.eye(2) > 0,
    ],
    ids=repr,
)
def test_types_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    if not isinstance(value, np.ndarray):
        assert found == value
        return
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)
    assert found.flags.writeable
