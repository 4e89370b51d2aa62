"""Safetensors files, written and read in small pieces.

A file holds the header's length in eight bytes, the header in JSON, and the tensors' bytes without
gaps (https://huggingface.co/docs/safetensors). A set of tensors over the shard limit is split into
several files, named and filled as by Hugging Face.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from dynoffload.checkpoint.extents import Held
from dynoffload.checkpoint.tensors import Memory
from dynoffload.errors import CheckpointError
from dynoffload.memory.pieces import Buffer

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""How safetensors names dtypes."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_LENGTH = 8  # bytes of the header's length
_LONGEST_HEADER = 100_000_000  # limit of the safetensors library


class Kind(NamedTuple):
    """A tensor's dtype, as safetensors names it, and shape; both must match to load it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of content."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def kind_of(name: str, held: Held) -> Kind:
    """Return dtype and shape under which the whole tensor is saved.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    tensor, shape = held.tensor, held.shape
    if tensor.dtype == torch.complex128:  # safetensors has no name for it: pairs, same bytes
        return Kind("F64", (*shape, 2))
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} is of {tensor.dtype}, for which safetensors has no name: convert it "
            "to another dtype"
        )
    return Kind(dtype, shape)


class Shard(NamedTuple):
    """One file to write: its name, its tensors in order, its first bytes and its size."""

    file: str
    tensors: dict[str, Held]
    head: bytes
    nbytes: int

    @property
    def is_spread(self) -> bool:
        """Whether several processes may write it."""
        return any(held.extent is not None for held in self.tensors.values())


def shards_of(stem: str, tensors: Mapping[str, Held], limit: int) -> list[Shard]:
    """Divide ``tensors`` over files of about ``limit`` bytes of content; a larger tensor gets a
    file of its own."""
    kinds = {name: kind_of(name, held) for name, held in tensors.items()}
    parts: list[list[str]] = []
    filled = 0
    for name, kind in kinds.items():
        if not parts or (filled + kind.nbytes > limit and filled):
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += kind.nbytes
    shards = []
    for at, names in enumerate(parts):
        file = f"{stem}.safetensors"
        if len(parts) > 1:
            file = f"{stem}-{at + 1:05d}-of-{len(parts):05d}.safetensors"
        # Widest elements first, so that each tensor starts at a multiple of its element size.
        names.sort(key=lambda name: -kinds[name].torch_dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            begin, end = end, end + kinds[name].nbytes
            header[name] = {**kinds[name]._asdict(), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH)
        if len(text) > _LONGEST_HEADER:
            raise CheckpointError(
                f"{file} would need a header of {len(text)} bytes, and safetensors reads at most "
                f"{_LONGEST_HEADER}: pass a smaller max_shard_size"
            )
        head = len(text).to_bytes(_LENGTH, "little") + text
        shards.append(Shard(file, {name: tensors[name] for name in names}, head, len(head) + end))
    return shards


def index_of(shards: list[Shard]) -> bytes:
    """Return the content of the index file, which maps tensors to shards."""
    total = sum(shard.nbytes - len(shard.head) for shard in shards)
    weights = {name: shard.file for shard in shards for name in shard.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def write_all(fd: int, data: bytes | memoryview, start: int = 0) -> None:
    """Write all of ``data`` from byte ``start``, in as many calls as needed."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, start)
        rest, start = rest[count:], start + count


@torch.no_grad()
def write(fd: int, shard: Shard, memory: Memory, buffer: Buffer, *, first: bool) -> int:
    """Write this process's parts of ``shard`` at their offsets.

    Args:
        fd: of the file, which is new.
        shard: the file.
        memory: where its tensors are stored.
        buffer: through which they are copied.
        first: whether this process also writes the header and the tensors that all hold.

    Returns:
        The checksum of the bytes written, in the order of writing.
    """
    start = len(shard.head)
    crc32 = 0
    if first:
        write_all(fd, shard.head)
        crc32 = zlib.crc32(shard.head)
    for name, held in shard.tensors.items():
        if held.span is not None or (first and held.extent is None):
            for element, values in held.stretches():
                at = start + element * held.tensor.element_size()
                for data in bytes_of(values, memory, buffer):
                    write_all(fd, data, at)
                    crc32, at = zlib.crc32(data, crc32), at + len(data)
        start += kind_of(name, held).nbytes
    return crc32


@torch.no_grad()
def bytes_of(values: torch.Tensor, memory: Memory, buffer: Buffer) -> Iterator[memoryview]:
    """Yield the bytes of a tensor piece by piece; each view is valid until the next."""
    for piece in memory.pieces(values):
        with memory.held(piece):
            buffer.like(piece).copy_(piece)
        yield buffer.bytes(piece.numel() * piece.element_size())


class Place(NamedTuple):
    """Location of a tensor's bytes in a file, with their dtype and shape."""

    fd: int
    file: str
    start: int
    kind: Kind


def read_head(fd: int, file: str, size: int) -> dict[str, Place]:
    """Return the tensors of a safetensors file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is malformed.
    """
    length = int.from_bytes(os.pread(fd, _LENGTH, 0), "little")
    if size < _LENGTH + length or length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(os.pread(fd, length, _LENGTH))
    header.pop("__metadata__", None)
    found, end = {}, 0
    for name, entry in header.items():
        kind = Kind(str(entry["dtype"]), tuple(entry["shape"]))
        if kind.dtype not in _DTYPES or any(type(n) is not int or n < 0 for n in kind.shape):
            raise ValueError(f"tensor {name!r} of unknown dtype or shape")
        if entry["data_offsets"] != [end, end + kind.nbytes]:
            raise ValueError(f"tensor {name!r} is not where it should be")
        found[name] = Place(fd, file, _LENGTH + length + end, kind)
        end += kind.nbytes
    if _LENGTH + length + end != size:
        raise ValueError(f"its tensors end at byte {_LENGTH + length + end} of {size}")
    return found


def read_exactly(fd: int, into: memoryview, start: int) -> None:
    """Fill ``into`` from a file, starting at byte ``start``.

    Raises:
        EOFError: the file is too short.
    """
    while into:
        count = os.preadv(fd, [into], start)
        if not count:
            raise EOFError("the file is shorter than it was")
        into, start = into[count:], start + count


@torch.no_grad()
def read(place: Place, held: Held, memory: Memory, buffer: Buffer) -> None:
    """Read this process's part of the tensor at ``place``, which has the same dtype and shape."""
    for element, values in held.stretches():
        start = place.start + element * held.tensor.element_size()
        for piece in memory.pieces(values):
            data = buffer.bytes(piece.numel() * piece.element_size())
            read_exactly(place.fd, data, start)
            start += len(data)
            with memory.held(piece):
                piece.copy_(buffer.like(piece))


def checksum_of(fd: int, size: int, buffer: Buffer) -> int:
    """Return the checksum of the first ``size`` bytes of a file.

    Raises:
        EOFError: the file is too short.
    """
    checksum = start = 0
    while start < size:
        data = buffer.bytes(size - start)
        read_exactly(fd, data, start)
        checksum = zlib.crc32(data, checksum)
        start += len(data)
    return checksum
