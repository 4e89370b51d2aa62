"""A checkpoint opened for reading, with every file verified and none unpickled.

Files are opened relative to one directory and stay open, so a concurrent save that replaces the
directory has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dynoffload.checkpoint import files, manifest
from dynoffload.checkpoint.extents import Held
from dynoffload.checkpoint.files import Place
from dynoffload.checkpoint.manifest import File, Manifest
from dynoffload.checkpoint.peers import Peers
from dynoffload.checkpoint.publishing import OURS, located, target_of
from dynoffload.checkpoint.tensors import Memory, Ordinary
from dynoffload.checkpoint.values import decode
from dynoffload.distributed.sharded import spread_like
from dynoffload.errors import CheckpointError, DynOffloadError
from dynoffload.memory.local import is_spread, local
from dynoffload.memory.pieces import Buffer, is_dense

_MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # from torch; also RecursionError
    EOFError,
)


class Stored(NamedTuple):
    """A tensor in a checkpoint: where its bytes are, and its layout in memory when saved."""

    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return an uninitialized tensor like it, on ``device`` if it was not on the CPU."""
        place = "cpu" if self.device == "cpu" else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    def part(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor for this process's part of it. ``like`` is the parameter,
        whose whole shape it has."""
        part = local(like)
        place = "cpu" if self.device == "cpu" and part is like else part.device
        made = torch.empty(part.shape, dtype=self.dtype, device=place)
        return spread_like(like, made)  # type: ignore[no-any-return]

    def fits(self, held: Held) -> bool:
        """Return whether this process's part of it can be read into ``held`` directly."""
        tensor = held.tensor
        is_part = held.extent is not None and not is_spread(tensor)
        return (
            (tensor.dtype, held.shape) == (self.dtype, self.shape)
            and (is_part or tensor.stride() == self.stride)
            and (tensor.device.type == "cpu") == (self.device == "cpu")
        )


class Opened:
    """A checkpoint whose files match the sizes and checksums of its manifest.

    Args:
        directory: of the checkpoint.
        stack: closes its files.
        peers: the processes that divide the computing of checksums among them.

    Attributes:
        path: of the directory.
        said: the manifest.
        checksum: of the manifest, and so of everything that it lists.
        tensors: of each set (``model``, ``optimizer``, ``extra``), by name.

    Raises:
        CheckpointError: there is none, or a file is missing, damaged, foreign or of a new version.
    """

    def __init__(
        self, directory: str | os.PathLike[str], stack: contextlib.ExitStack, peers: Peers
    ) -> None:
        self.path = target_of(directory)
        self.tensors: dict[str, dict[str, Place]] = {"model": {}, "optimizer": {}, "extra": {}}
        self._stack, self._buffer = stack, Buffer()
        place = located(self.path)
        try:
            self._directory = self._open(str(place), os.O_DIRECTORY, None)
            data = self._content(manifest.NAME)
            self.said = Manifest.of(data, str(self.path / manifest.NAME))
            self.checksum = zlib.crc32(data)
            for number, (name, file) in enumerate(self.said.files.items()):
                self._check(name, file, sums=number % peers.world == peers.rank)
        except OSError as error:
            if isinstance(error, DynOffloadError):
                raise
            raise CheckpointError(
                error.errno or errno.EIO, f"cannot read checkpoint {self.path}: {self._why(error)}"
            ) from error

    def _open(self, name: str, flags: int, directory: int | None) -> int:
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=directory)
        self._stack.callback(os.close, fd)
        return fd

    def _content(self, name: str) -> bytes:
        fd = self._open(name, 0, self._directory)
        data = bytearray(os.fstat(fd).st_size)
        with self.sound(name):
            files.read_exactly(fd, memoryview(data), 0)
        return bytes(data)

    def _why(self, error: OSError) -> str:
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and self.path.is_dir():
            if (self.path / manifest.NAME).exists():
                return f"it lacks file {error.filename!r}; load another"
            return (
                f"it has no {manifest.NAME}, so no save of dynoffload made it; weights alone are "
                "read by model.load_state_dict or dynoffload.materialize"
            )
        if error.errno == errno.ENOENT:
            return "there is none; name the directory that was saved to"
        if error.errno == errno.ENOTDIR:
            return "it is a file; name the directory that was saved to"
        return f"{error.strerror or error}; check that disk, or load another"

    def _check(self, name: str, file: File, *, sums: bool) -> None:
        if not OURS.fullmatch(name):
            raise CheckpointError(f"checkpoint {self.path} names a foreign file {name!r}")
        fd = self._open(name, 0, self._directory)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.bytes:
            raise CheckpointError(
                f"{self.path / name} has {found.st_size} bytes, and {file.bytes} were saved: "
                "load another checkpoint"
            )
        with self.sound(name):
            if sums and files.checksum_of(fd, file.bytes, self._buffer) != file.crc32:
                raise ValueError("its checksum is not that of what was saved")
            if name.endswith(".safetensors"):
                known = self.tensors[name.split("-")[0].split(".")[0]]
                head = files.read_head(fd, name, file.bytes)
                if twice := known.keys() & head.keys():
                    raise ValueError(f"tensor {min(twice)!r} is in two files")
                known.update(head)

    @contextlib.contextmanager
    def sound(self, what: str) -> Iterator[None]:
        """Report malformed content of ``what`` as damage.

        Raises:
            CheckpointError: replaces the original error.
        """
        try:
            yield
        except DynOffloadError:
            raise
        except _MALFORMED as error:
            raise CheckpointError(
                f"{what} of checkpoint {self.path} is damaged ({error}): load another checkpoint"
            ) from error

    def stored(self, family: str, said: dict[str, Any]) -> Stored:
        """Return the tensor that an encoded value refers to.

        Raises:
            ValueError, KeyError, TypeError, RuntimeError: there is no such tensor.
        """
        place = self.tensors[family][said["name"]]
        dtype, shape = place.kind.torch_dtype, place.kind.shape
        if said.get("pairs", False):
            if dtype != torch.float64 or shape[-1:] != (2,):
                raise ValueError(f"tensor {said['name']!r} is of no complex numbers")
            dtype, shape = torch.complex128, shape[:-1]
        usual = torch.empty(shape, dtype=dtype, device="meta")
        stride = tuple(said.get("stride", usual.stride()))
        if stride != usual.stride():
            if len(stride) != len(shape):
                raise ValueError(f"tensor {said['name']!r} has {len(stride)} strides")
            if not is_dense(torch.empty_strided(shape, stride, device="meta")):
                raise ValueError(f"tensor {said['name']!r} has gaps")
        return Stored(place, dtype, shape, stride, str(said.get("device", "cpu")))

    def read(self, place: Place, held: Held, memory: Memory) -> None:
        """Read this process's part of a tensor in place."""
        files.read(place, held, memory, self._buffer)

    def decode(self, family: str, value: Any) -> Any:
        """Return a decoded value, with its tensors read."""

        def get(said: dict[str, Any]) -> torch.Tensor:
            stored = self.stored(family, said)
            tensor = stored.empty()
            self.read(stored.place, Held(tensor), Ordinary())
            return tensor

        return decode(value, get)
