"""Bytes and seconds as people write and read them; inside the package they are ints and floats."""

from __future__ import annotations

import re

from dynoffload.errors import ConfigError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_FACTORS = {
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KiB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MiB,
    "g": 10**9,
    "gb": 10**9,
    "gib": GiB,
    "t": 10**12,
    "tb": 10**12,
    "tib": 1024 * GiB,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


class Quantity(int):
    """A number of bytes that `format_bytes` shows as the user wrote it.

    Attributes:
        text: as it was written, such as ``"16MB"``.
    """

    text: str

    def __new__(cls, count: int, text: str) -> Quantity:
        """Return ``count`` with its ``text``."""
        made = super().__new__(cls, count)
        made.text = text
        return made

    def __reduce__(self) -> tuple[type[Quantity], tuple[int, str]]:
        return Quantity, (int(self), self.text)


def parse_bytes(quantity: int | str, argument: str = "") -> int:
    """Return ``quantity`` in bytes: an int as it is, or a text such as ``"8GiB"`` or ``"500MB"``,
    whose spelling `format_bytes` keeps.

    Args:
        quantity: the user's value.
        argument: its name, for the error.

    Raises:
        ConfigError: the quantity is negative, not a whole number of bytes, unreadable, or a text
            with a small number and no unit.
    """
    where = f"{argument}={quantity!r}: " if argument else ""
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        remedy = ": make it whole with int()" if isinstance(quantity, float) else ""
        raise ConfigError(
            f"{where}a quantity of bytes is an int or a text like '8GiB', not {quantity!r}{remedy}"
        )
    if isinstance(quantity, int):
        if quantity < 0:
            raise ConfigError(f"{where}a quantity of bytes cannot be negative: {quantity}")
        return quantity
    match = _QUANTITY.fullmatch(quantity)
    if match and not match.group(2):
        number = match.group(1)
        if number.isdecimal() and int(number) >= MiB:
            return int(number)  # so large a number can only mean bytes
        whole = "" if "." in number else f", or '{number}B' if bytes are meant"
        raise ConfigError(
            f"{where}{quantity!r} has no unit to read it as bytes: write '{number}GiB' or "
            f"'{number}MB'{whole}"
        )
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{where}cannot read {quantity!r} as bytes: write a number and a unit, such as '8GiB' "
            "or '500MB'"
        )
    count = float(match.group(1)) * factor
    if factor == 1 and not count.is_integer():
        raise ConfigError(
            f"{where}{quantity!r} is no whole number of bytes: name its unit, as in '1.5GiB'"
        )
    return Quantity(int(count), quantity.strip())


def format_bytes(count: float) -> str:
    """Return ``count`` bytes as a person reads it: ``"3.50 GiB"``, or as the user wrote it."""
    if isinstance(count, Quantity):
        return count.text
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` as a person reads it: ``"12.3 ms"``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def readable(nbytes: int) -> int:
    """Return the least number of bytes, ``nbytes`` or more, that `format_bytes` writes exactly."""
    while (read := parse_bytes(format_bytes(nbytes))) < nbytes:
        nbytes += max(1, nbytes // 2048)
    return read
