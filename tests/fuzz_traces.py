"""Mutated traces: of the bytes, of the footer and pages, of columns and header, sealed again.

What it is: `TraceMutator`. What it is not: the use of what it makes; see `fuzz_uses`.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_thrift import encode, mutate, parse
from fuzz_values import damage, mutate_json, text_of

from dynoffload.profiler.storage import seal

_SEAL_BYTES = len(b"dynoffload.seal\n") + 32
_HEADER, _VERSION = b"dynoffload.trace", b"dynoffload.trace_version"
_EXTREMES = (0, 1, -1, 2, 3, 99, 127, -128, 2**15 - 1, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1)
_TIMES = (0.0, -0.0, -1.0, 1e-300, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"))
_WORDS = (
    b"",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\1\0\0\0" * 500,
    b"abc",
    b"\0\0\0\x80",
    b"\5\0\0\0",
)
_TYPES = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.binary(),
          pa.bool_(), pa.float32(), pa.timestamp("us"), pa.list_(pa.int32()))  # fmt: skip
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"compression": "ZSTD"}, {"compression": "SNAPPY"}, {"compression": "GZIP"},
    {"row_group_size": 1}, {"row_group_size": 7}, {"data_page_version": "2.0"},
    {"use_dictionary": False}, {"use_dictionary": True, "dictionary_pagesize_limit": 64},
    {"data_page_size": 64, "write_batch_size": 4}, {"version": "1.0"}, {"write_statistics": False},
    {"store_schema": False}, {"write_page_index": True}, {"write_page_checksum": True},
    {"use_dictionary": False, "use_byte_stream_split": ["seconds"]},
    {"use_dictionary": False, "column_encoding": {"call": "DELTA_BINARY_PACKED"}},
)  # fmt: skip


class TraceMutator:
    """Makes mutated traces.

    Args:
        traces: undamaged traces, by name.
    """

    def __init__(self, traces: dict[str, Path]) -> None:
        self._raw = {name: path.read_bytes() for name, path in traces.items()}
        self._plain = {name: _unsealed(data) for name, data in self._raw.items()}
        self._tables = {name: pq.read_table(io.BytesIO(data)) for name, data in self._plain.items()}
        self._headers = {
            name: json.loads(table.schema.metadata[_HEADER]) for name, table in self._tables.items()
        }

    def make(self, chance: random.Random) -> tuple[str, str, bytes]:
        """Return the name of what was mutated, the kind of mutation, and the file."""
        names = sorted(self._raw, key=lambda name: len(self._raw[name]))
        name = chance.choices(names, range(3 * len(names), 0, -3))[0]  # the small ones rather
        kind = chance.choices(
            ("bytes", "sealed", "footer", "pages", "header", "columns", "layout", "bomb"),
            (18, 28, 32, 28, 48, 32, 13, 0.6),
        )[0]
        if kind == "bytes":
            how, data = damage(chance, self._raw[name])
            return name, f"trace bytes: {how}", data
        plain = self._plain[name]
        if kind == "sealed":
            return name, "trace sealed bytes", seal(_damage_part(chance, plain))
        if kind == "footer":
            return name, "trace footer", seal(_with_footer(plain, lambda f: _several(chance, f)))
        if kind == "pages":
            return name, "trace pages", seal(_with_page(chance, plain))
        table, header = self._tables[name], self._headers[name]
        options: dict[str, Any] = {}
        text = table.schema.metadata[_HEADER]
        how = kind
        if kind == "header":
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                header = mutate_json(chance, header)
            text = text_of(chance, header)
        elif kind == "columns":
            for _ in range(chance.choice((1, 1, 2, 4))):
                table = _mutate_column(chance, table)
        elif kind == "layout":
            table, options = _mutate_layout(chance, table)
        else:
            how, table, header = _bomb(chance, table, header)
            text = json.dumps(header, separators=(",", ":")).encode()
        version = chance.choice((b"1", b"2", b"3", b"3", b"0", b"9")) if kind == "layout" else b"3"
        if chance.random() < 0.1 and {"flops", "dtype"} <= {*table.column_names}:
            table, version = table.drop_columns(["flops", "dtype"]), b"1"
        return name, f"trace {how}", write(table, {_VERSION: version, _HEADER: text}, options)


def write(table: Any, metadata: dict[bytes, bytes], options: dict[str, Any]) -> bytes:
    """Return a table as a sealed file."""
    written = io.BytesIO()
    made = table.replace_schema_metadata(metadata)
    pq.write_table(made, written, **{"compression": "NONE", **options})
    return seal(written.getvalue())


def _unsealed(data: bytes) -> bytes:
    stop = _footer(data)
    return data[: stop - _SEAL_BYTES] + data[stop:]


def _footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _damage_part(chance: random.Random, plain: bytes) -> bytes:
    """Damage columns or footer; what is said of the footer's length stays right, or lies."""
    start = _footer(plain)
    pages, footer = plain[:start], plain[start:-8]
    if chance.random() < 0.5:
        # What comes before the header's long text: the schema and the groups.
        footer = (
            damage(chance, footer[-6000:])[1]
            if chance.random() < 0.5
            else damage(chance, footer)[1]
        )
    else:
        pages = b"PAR1" + damage(chance, pages[4:])[1]
    length = len(footer)
    if chance.random() < 0.05:
        length = chance.choice((0, 1, length - 1, length + 1, 2**31, 2**32 - 1))
    return pages + footer + length.to_bytes(4, "little") + b"PAR1"


def _several(chance: random.Random, fields: list[Any]) -> None:
    for _ in range(chance.choice((1, 1, 2, 5))):
        if fields:
            mutate(chance, fields)


def _with_footer(plain: bytes, change: Any, more: bytes = b"") -> bytes:
    start = _footer(plain)
    fields, _ = parse(plain, start)
    change(fields)
    footer = encode(fields)
    return plain[:start] + more + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _with_page(chance: random.Random, plain: bytes) -> bytes:
    """Change one column's pages, in a copy after the others, and lead the footer to it."""
    start = _footer(plain)
    fields, _ = parse(plain, start)
    groups = _field(fields, 4)[2][1]
    chunk = _field(chance.choice(_field(groups[0], 1)[2][1]), 3)[2]
    places = [entry for entry in chunk if entry[0] in (9, 11)]
    at = begin = min(entry[2] for entry in places if entry[2] > 0)
    stop = begin + _field(chunk, 7)[2]
    pages: list[tuple[list[Any], bytes, int]] = []
    while at < stop:
        page, body = parse(plain, at)
        size = _field(page, 3)[2]
        pages.append((page, plain[body : body + size], at))
        at = body + size
    number = chance.randrange(len(pages))
    page, body_bytes, _ = pages[number]
    if chance.random() < 0.5:
        _several(chance, page)
    elif body_bytes:
        body_bytes = damage(chance, body_bytes)[1]
        if chance.random() < 0.9:
            for entry in page:
                if entry[0] in (2, 3):
                    entry[2] = len(body_bytes)
    pages[number] = (page, body_bytes, 0)
    if chance.random() < 0.1:
        chance.shuffle(pages)
    made = b""
    moved: dict[int, int] = {}
    for page, body_bytes, old in pages:
        moved[old] = start + len(made)
        made += encode(page) + body_bytes

    def lead(fields: list[Any]) -> None:
        for group in _field(fields, 4)[2][1]:
            for column in _field(group, 1)[2][1]:
                about = _field(column, 3)[2]
                if min(e[2] for e in about if e[0] in (9, 11) and e[2] > 0) != begin:
                    continue
                for entry in about:
                    if entry[0] in (9, 11) and entry[2] > 0:
                        entry[2] = moved.get(entry[2], start)
                    elif entry[0] in (6, 7):
                        entry[2] = len(made)

    return _with_footer(plain, lead, made)


def _field(fields: list[Any], number: int) -> Any:
    return next(entry for entry in fields if entry[0] == number)


def _mutate_column(chance: random.Random, table: Any) -> Any:
    """Change values of a column."""
    name = chance.choice(table.column_names)
    field = table.schema.field(name)
    values = table[name].to_pylist()
    pool: tuple[Any, ...] = _EXTREMES
    if field.type == pa.float64():
        pool = _TIMES
    elif field.type == pa.binary():
        pool = _WORDS
    elif field.type == pa.string():
        pool = ("", "x" * 4000, "\x00", "\x1b[2J", "é𝒳", "..", "a.b.c", *values[:3])
    if pa.types.is_integer(field.type):
        limit = 2 ** (field.type.bit_width - 1)
        pool = tuple(value for value in pool if -limit <= value < limit)
    how = chance.randrange(5)
    if not values:
        return table
    if how <= 2:
        for _ in range(chance.choice((1, 1, 3, len(values)))):
            values[chance.randrange(len(values))] = chance.choice(pool)
    elif how == 3:
        values = [chance.choice(pool)] * len(values)
    else:
        chance.shuffle(values)
    return table.set_column(table.column_names.index(name), field, pa.array(values, field.type))


def _mutate_layout(chance: random.Random, table: Any) -> tuple[Any, dict[str, Any]]:
    """Change columns, types, nulls, the number of rows, or how they are written."""
    how = chance.randrange(8)
    place = chance.randrange(len(table.column_names))
    name = table.column_names[place]
    options = dict(chance.choice(_OPTIONS)) if how in (0, 1) or chance.random() < 0.2 else {}
    if how == 2:
        kind = chance.choice(_TYPES)
        empty = [[0]] if pa.types.is_list(kind) else [0]
        cast = pa.array(empty * table.num_rows) if pa.types.is_list(kind) else None
        try:
            cast = table[name].cast(kind) if cast is None else cast
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            cast = pa.nulls(table.num_rows, kind)
        table = table.set_column(place, name, cast)
        options = {}
    elif how == 3:
        field = pa.field(name, table.schema.field(name).type)
        values = [None if chance.random() < 0.2 else v for v in table[name].to_pylist()]
        table = table.set_column(place, field, pa.array(values, field.type))
    elif how == 4:
        table = table.drop_columns([name])
        options = {}
    elif how == 5:
        names = [*table.column_names]
        chance.shuffle(names)
        table = table.select(names)
    elif how == 6:
        rows = chance.choice((0, 1, table.num_rows - 1))
        table = table.slice(0, max(0, rows))
    elif how == 7:
        table = pa.concat_tables([table] * chance.choice((2, 3)))
    return table, options


def _bomb(chance: random.Random, table: Any, header: Any) -> tuple[str, Any, Any]:
    """Return what takes far more memory or time than bytes, if nothing stops it."""
    header = dict(header)
    how = chance.choice(("rows", "uses", "calls", "lists", "regions", "hints", "variants"))
    fields = table.schema
    many = chance.choice((20_000, 60_000))
    if how in ("rows", "uses"):
        rows = table.num_rows + (900_000 if how == "rows" else 4000)
        take = np.zeros(rows, np.int64)
        wide = np.zeros(20_000, "<i4").tobytes()
        columns = {}
        for field in fields:
            value = table[field.name][0].as_py()
            if how == "uses" and field.name in ("reads", "writes"):
                value = wide
            columns[field.name] = pa.array([value], field.type).take(pa.array(take))
        table = pa.table(columns, schema=fields)
        header["calls"] = [[], [], [], [], []]
    elif how == "calls":
        deep = list(range(-1, many - 1))
        header["calls"] = [["a"] * many, ["k"] * many, deep, [0] * many, [table.num_rows] * many]
    elif how == "variants":
        keys = [str(i) for i in range(many)]
        header["calls"] = [["a"] * many, keys, [-1] * many, [0] * many, [table.num_rows] * many]
    elif how == "lists":
        header["other"] = [[]] * (many * 20)
    elif how == "regions":
        header["regions"] = [
            ["a"] * many,
            ["input"] * many,
            [2**61] * many,
            [-1] * many,
            [-1] * many,
        ]
    else:
        header["hinted"] = [["a"] * 4096]
        header["hints"] = [[0, 0, [0.5] * 4096]] * (many // 4000)
    return f"bomb: {how}", table, header
