"""``checkpoint.json``: values that are not tensors, and every other file's size and checksum.

A directory without it is not a checkpoint. The checksums detect damage by disks and copies, not
tampering.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynoffload.errors import CheckpointError

NAME = "checkpoint.json"
_FORMAT = "dynoffload checkpoint"
_VERSIONS = 1, 2  # version 2 adds random_of_others, of several ranks
_MAGIC = f'{{\n "format": "{_FORMAT}"'.encode()


class File(NamedTuple):
    """Expected size of a file in bytes, and its CRC-32."""

    bytes: int
    crc32: int


@dataclass
class Manifest:
    """Content of `checkpoint.json`; values are encoded by `values`.

    Attributes:
        written_by: versions, for information only.
        files: every other file of the checkpoint, by name.
        tied: further names of tensors -> the name under which they are saved.
        module_state: names of ``get_extra_state`` -> its value.
        optimizer: type, groups and state; None without an optimizer.
        extra: the objects passed as ``extra``: name -> type and state.
        random: the state of the random number generators.
        random_of_others: the same for each rank after the first, if several saved together.
    """

    written_by: dict[str, str] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    module_state: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    random_of_others: list[dict[str, Any]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        files = {name: file._asdict() for name, file in self.files.items()}
        content: dict[str, Any] = {**vars(self), "files": files}
        if not self.random_of_others:
            del content["random_of_others"]
        document = {
            "format": _FORMAT,
            "version": _VERSIONS[bool(self.random_of_others)],
            "crc32": _checksum(content),
            "content": content,
        }
        return json.dumps(document, indent=1, allow_nan=False).encode()

    @staticmethod
    def of(data: bytes, place: str) -> Manifest:
        """Parse ``data``, the content of the file at ``place``.

        Raises:
            CheckpointError: it is not a manifest, damaged, or of a newer version.
        """
        remedy = "load another checkpoint"
        try:
            document = json.loads(data)
            form, version = document["format"], document["version"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{place} is damaged or foreign ({error}): {remedy}") from error
        if form != _FORMAT:
            raise CheckpointError(f"{place} is not of dynoffload: {remedy}")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{place} is of format {version!r:.20} and this dynoffload reads {_VERSIONS[-1]}: "
                "read it with the version that wrote it, or a later one"
            )
        try:
            content = document["content"]
            if document["crc32"] != _checksum(content):
                raise ValueError("its checksum differs")
            manifest = Manifest(**content)
            for name, value in vars(manifest).items():
                if not isinstance(value, list if name == "random_of_others" else dict) and (
                    name != "optimizer" or value is not None
                ):
                    raise TypeError(f"{name} is {type(value).__name__}")
            manifest.files = {
                name: File(int(file["bytes"]), int(file["crc32"]))
                for name, file in content["files"].items()
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{place} is damaged ({error}): {remedy}") from error
        return manifest


def is_manifest(first_bytes: bytes) -> bool:
    """Return whether a file with these first bytes was written by dynoffload, complete or not."""
    return first_bytes.startswith(_MAGIC)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())
