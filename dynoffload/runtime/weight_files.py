"""Weights in safetensors files, one file or the shards of an index, copied tensor by tensor."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dynoffload.errors import ConfigError

Bring = Callable[[Iterable[torch.Tensor]], None]
"""Called with tensors before they are written, to fetch their memory."""

Piece = tuple[str, tuple[int, ...], tuple[slice, ...]]
"""A part of a tensor in a file: the tensor's name and shape, and the part's slices; ``()``: all."""

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""The names that transformers gives to the files of a model."""

_FITS = (
    "give one whose names and shapes are those of this model's state_dict(), as safetensors' "
    "save_file(model.state_dict(), path) writes them"
)


@runtime_checkable
class Tiled(Protocol):
    """A module whose parameters are pieces of larger ones, such as those of `dynoffload.tile`."""

    def tile_pieces(self, prefix: str) -> Mapping[str, Piece]:
        """Return its pieces by full name, which begins with ``prefix``."""


class WeightFiles:
    """The tensors of ``path``: a safetensors file, an index of shards, or a directory with either.

    Raises:
        ConfigError: a file is missing, cannot be read, or is of another kind.
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

    def check(self, model: nn.Module, empty: Collection[str], *, makes: bool) -> None:
        """Refuse a model that these files do not fit.

        Args:
            model: on the meta device or not.
            empty: names of tensors without a value.
            makes: whether a function makes the buffers that are not saved.

        Raises:
            ConfigError: a tensor is missing or has another shape.
        """
        persistent = set(model.state_dict().keys())
        for names, _, (name, shape, _) in self._found(model):
            if name:
                if self._shapes[name] != list(shape):
                    raise ConfigError(
                        f"tensor {name!r} of {self.path} has shape {self._shapes[name]} but the "
                        f"model's has {list(shape)}: {_FITS}"
                    )
            elif not persistent.isdisjoint(names):
                raise ConfigError(f"{self.path} has no tensor {names[0]!r}: {_FITS}")
            elif not makes and not frozenset(names).isdisjoint(empty):
                raise ConfigError(
                    f"{self.path} has no tensor {names[0]!r}, a buffer that is not saved: pass "
                    "materialize() init=(path, function) with a function that makes the buffers of "
                    "a module"
                )

    def lacks(self, model: nn.Module, empty: Collection[str]) -> frozenset[str]:
        """Return the names in ``empty`` whose tensors are in no file under any of their names."""
        found = (names for names, _, (name, _, _) in self._found(model) if not name)
        return frozenset(name for names in found for name in names if name in empty)

    def copy_to(self, model: nn.Module, bring: Bring) -> None:
        """Copy the tensors of the files into those of ``model``, file by file."""
        wanted: dict[Path, list[tuple[torch.Tensor, Piece]]] = {}
        for _, tensor, piece in self._found(model):
            if name := piece[0]:
                wanted.setdefault(self._files[name], []).append((tensor, piece))
        for file, tensors in wanted.items():
            with _opened(file) as opened:
                for tensor, (name, _, index) in tensors:
                    bring([tensor])
                    tensor.copy_(_read(opened, file, name, index))

    def _found(self, model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor, Piece]]:
        """Yield each tensor of ``model``: its names, itself, and its piece of a file, whose name is
        "" if no file has it."""
        pieces = {
            name: piece
            for path, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, Tiled)
            for name, piece in module.tile_pieces(f"{path}." if path else "").items()
        }
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(tensor, []).append(name)
        for tensor, its in names.items():
            whole = tuple(tensor.shape)
            known = ((name, whole, ()) if name in self._files else pieces.get(name) for name in its)
            here = (piece for piece in known if piece is not None and piece[0] in self._files)
            yield its, tensor, next(here, ("", whole, ()))


def _file_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (INDEX, WHOLE):
        if (path / name).exists():
            return path / name
    raise ConfigError(
        f"the directory {path} has neither {INDEX} nor {WHOLE}: name the safetensors file itself"
    )


def _listed(path: Path) -> dict[Path, list[str] | None]:
    """Return the files, and the tensor names to take from each; None: all of it."""
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
        raise ConfigError(
            f"cannot read {path}: {error.strerror}: name a file that can be read"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no index of safetensors files (a 'weight_map' of names and files): {error}"
        ) from error
    return files


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        with _naming(path):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file


def _read(opened: Any, path: Path, name: str, index: tuple[slice, ...]) -> torch.Tensor:
    with _naming(path):
        found = opened.get_slice(name)[index] if index else opened.get_tensor(name)
    tensor: torch.Tensor = found
    return tensor


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors raised inside."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            why = "there is no such file"
        elif isinstance(error, OSError):
            why = error.strerror or str(error)
        else:
            why = str(error)
        raise ConfigError(
            f"cannot read {path} as safetensors: {why}: give a file that safetensors' save_file "
            "has written (torch.load reads others)"
        ) from error
