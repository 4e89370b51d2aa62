"""Weights in safetensors files: one file, or the shards that an index names.

What it is: `Stored`, which knows the names and shapes of what is on disk, checks them against a
model before anything is written, and copies one tensor at a time. What it is not: a checkpoint of
dynoffload's own (`dynoffload.runtime.checkpoints`), nor a conversion of names.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.filling import Bring

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""What transformers names the files of a model."""

_FITS = "give one whose names and shapes are those of this model's state_dict()"


class Stored:
    """The tensors of ``path``: a safetensors file, an index of shards, or a directory with either.

    Raises:
        ConfigError: a file is missing, cannot be read, or is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _file_in(Path(path))
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        for file, names in _listed(self.path).items():
            with _opened(file) as opened:
                held = set(opened.keys())
                for name in held if names is None else names:
                    if name not in held:
                        raise ConfigError(
                            f"{file} has no tensor {name!r}, which {self.path} says it has: "
                            "complete the download, or save the model again"
                        )
                    self._files[name] = file
                    self._shapes[name] = list(opened.get_slice(name).get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def check(self, model: nn.Module, empty: Collection[str], *, makes: bool) -> None:
        """Refuse a model that this does not fit.

        Args:
            model: on the meta device or not.
            empty: names of what has no value.
            makes: whether somebody else makes the buffers that are not saved.

        Raises:
            ConfigError: a tensor is lacking or has another shape.
        """
        persistent = set(model.state_dict().keys())
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in self:
                if self._shapes[name] != list(tensor.shape):
                    raise ConfigError(
                        f"tensor {name!r} of {self.path} has shape {self._shapes[name]} but the "
                        f"model's has {list(tensor.shape)}: {_FITS}"
                    )
            elif name in persistent:
                raise ConfigError(f"{self.path} has no tensor {name!r}: {_FITS}")
            elif not makes and name in empty:
                raise ConfigError(
                    f"{self.path} has no tensor {name!r}, a buffer that is not saved: pass "
                    "materialize() init=(path, function) with a function that makes the buffers of "
                    "a module"
                )

    def copy_to(self, model: nn.Module, kept: Collection[str], bring: Bring) -> None:
        """Copy into the tensors of ``model`` that are here, but for those ``kept``."""
        wanted: dict[Path, list[tuple[str, Any]]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in self and name not in kept:
                wanted.setdefault(self._files[name], []).append((name, tensor))
        for file, tensors in wanted.items():
            with _opened(file) as opened:
                for name, tensor in tensors:
                    bring([tensor])
                    tensor.copy_(opened.get_tensor(name))


def _file_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (INDEX, WHOLE):
        if (path / name).exists():
            return path / name
    raise ConfigError(
        f"the directory {path} has neither {INDEX} nor {WHOLE}: name the safetensors file itself "
        "(a checkpoint of dynoffload's own is read by session.load)"
    )


def _listed(path: Path) -> dict[Path, list[str] | None]:
    """Return the files, and what to take of each; None: all of it."""
    if path.suffix != ".json":
        return {path: None}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in listed.items():
            if Path(file).name != file:
                raise ConfigError(f"{path} names a file outside of its directory: {file!r}")
            names = files.setdefault(path.parent / file, [])
            assert names is not None
            names.append(name)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no index of safetensors files (a 'weight_map' of names and files): {error}"
        ) from error
    return files


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    open_: Callable[..., Any] = safe_open
    try:
        with open_(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path} as safetensors: {error}") from error
