"""Quantities of bytes, as people write them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.units import GiB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("8GiB", 8 * GiB),
        ("8 gb", 8 * 10**9),
        (" 1.5 MB ", 1_500_000),
        ("8B", 8),
        ("1000000000", 10**9),
        (8, 8),
        (0, 0),
    ],
)
def test_a_number_with_its_unit_is_read(quantity: int | str, expected: int) -> None:
    assert parse_bytes(quantity) == expected


@pytest.mark.parametrize(
    ("quantity", "remedy"),
    [
        ("8", r"'8' has no unit .*'8GiB'.*'8B' if bytes are meant"),
        ("1.5", r"'1.5' has no unit .*'1.5GiB' or '1.5MB'$"),
        ("1.5B", "no whole number of bytes"),
        (1.5e9, r"int or a text.*not 1500000000\.0: make it whole with int\(\)"),
        (-1, "cannot be negative"),
        ("-8GiB", "write a number and a unit"),
        ("", "write a number and a unit"),
        ("GiB", "write a number and a unit"),
        ("8 parsecs", "write a number and a unit"),
        (True, "int or a text"),
    ],
    ids=repr,
)
def test_what_is_no_quantity_is_refused_with_the_remedy(quantity: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse_bytes(quantity)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (90 * GiB, "90.00 GiB"),
        (99 << 40, "99.00 TiB"),
    ],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("typed", ["16MB", "1.5 GiB", " 8gb "])
def test_bytes_are_shown_as_they_were_typed(typed: str) -> None:
    count = parse_bytes(typed)
    assert format_bytes(count) == typed.strip()
    assert format_bytes(copy.deepcopy(count)) == typed.strip()
    assert format_bytes(pickle.loads(pickle.dumps(count))) == typed.strip()
    assert format_bytes(count + 0) == format_bytes(int(count))  # what was computed was not typed
    assert json.dumps(count) == str(int(count))
