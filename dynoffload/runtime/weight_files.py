"""Weights in safetensors files, one file or the shards of an index, copied part by part."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dynoffload.checkpoint.files import NAMES, Place, read_head
from dynoffload.errors import ConfigError
from dynoffload.memory.sources import Extent, SourceFile
from dynoffload.runtime.file_parts import Conversion, FileValue, Part, Shape, run_of, whole

Bring = Callable[[Iterable[torch.Tensor]], None]
"""Called with tensors before they are written, to fetch their memory."""

ExtentsOf = Callable[[FileValue, torch.dtype], list[Extent] | None]
Link = Callable[[torch.Tensor, FileValue, ExtentsOf], bool]
"""Called with a tensor, its value, and what returns where a value lies. Returns whether the tensor
is read from there from now on."""

Piece = tuple[str, Shape, tuple[slice, ...]]
"""A part of a larger tensor: its name and shape, and the part's slices; ``()``: all."""

Values = Callable[
    [nn.Module, Mapping[str, Shape], "WeightFiles"],
    tuple[Mapping[str, FileValue], Collection[str]],
]
"""Returns by name the values that files have for a model, and the names of tensors that they may
lack; given the shapes of its tensors."""

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""The names that transformers gives to the files of a model."""

_WIDE = ("F64", "F32", "F16", "BF16")
_FITS = (
    "give one whose names and shapes are those of this model's state_dict(), as safetensors' "
    "save_file(model.state_dict(), path) writes them"
)
_SAVED = "give the files that save_pretrained() wrote for a model of this class and this config"
_BY_TRANSFORMERS = (
    "call dynoffload.integrations.transformers.materialize(model, path), which reads what "
    "save_pretrained() writes"
)


class WeightFiles:
    """The tensors of ``path``: a safetensors file, an index of shards, or a directory with either.

    Args:
        path: of the file, index or directory.
        model: that gets them; on the meta device or not.
        values: returns what the files have for it; by default, tensors under the model's names.

    Attributes:
        path: of the file, or the index.
        shapes: of all tensors in the files, by name.
        values: what the files have, by the model's names.

    Raises:
        ConfigError: a file is missing, cannot be read, or is of another kind, or as ``values``.
    """

    def __init__(self, path: str | Path, model: nn.Module, values: Values | None = None) -> None:
        self.path = _file_in(Path(path))
        read = self.path, self.path.with_name("config.json")
        self._wanted, self._stamps = _shapes_of(model), {file: _stamp(file) for file in read}
        self.shapes: dict[str, Shape] = {}
        self._files: dict[str, Path] = {}
        self._kinds: dict[str, str] = {}
        self._sources: dict[Path, SourceFile] = {}
        self._heads: dict[Path, Mapping[str, Place]] = {}
        for file, names in _listed(self.path).items():
            self._stamps[file] = _stamp(file)
            with _opened(file) as opened:
                held = set(opened.keys())
                for name in held if names is None else names:
                    if name not in held:
                        raise ConfigError(
                            f"{file} has no tensor {name!r}, which {self.path} says it has: "
                            "complete the download, or save the model again"
                        )
                    self._files[name] = file
                    found = opened.get_slice(name)
                    self.shapes[name], self._kinds[name] = (
                        tuple(found.get_shape()),
                        found.get_dtype(),
                    )
        if values is None:
            self._remedy = _BY_TRANSFORMERS if is_of_transformers(model) else _FITS
            self.values: Mapping[str, FileValue] = {
                name: whole(name, shape) for name, shape in self.shapes.items()
            }
            self._may_lack: Collection[str] = ()
        else:
            self._remedy = _SAVED
            self.values, self._may_lack = values(model, self._wanted, self)

    def still_hold(self, path: str | Path, model: nn.Module) -> bool:
        """Return whether ``path`` has these files, unchanged since, and the tensors of ``model``
        have their names and shapes of then."""
        with contextlib.suppress(ConfigError):
            files = _file_in(Path(path)) == self.path
            files = files and all(_stamp(file) == one for file, one in self._stamps.items())
            return files and _shapes_of(model) == self._wanted
        return False

    def file_of(self, name: str) -> Path:
        """Return the file that has the tensor ``name``."""
        return self._files[name]

    def check(self, model: nn.Module, empty: Collection[str], *, makes: bool) -> None:
        """Refuse a model that these files do not fit.

        Args:
            model: on the meta device or not.
            empty: names of tensors without a value.
            makes: whether a function makes the buffers that are not saved.

        Raises:
            ConfigError: a tensor is missing, has another shape, or is quantized.
        """
        persistent = self._wanted.keys() - set(self._may_lack)
        for names, tensor, (name, shape, _) in self._found(model):
            if name:
                self._check_kinds(names[0], tensor, self.values[name])
                value = self.values[name]
                if value.shape != shape:
                    called = value.parts[0].source if len(value.parts) == 1 else name
                    raise ConfigError(
                        f"tensor {called!r} of {self.path} has shape {list(value.shape)} but the "
                        f"model's has {list(shape)}: {self._remedy}"
                    )
            elif not persistent.isdisjoint(names):
                raise ConfigError(f"{self.path} has no tensor {names[0]!r}: {self._remedy}")
            elif not makes and not frozenset(names).isdisjoint(empty):
                raise ConfigError(
                    f"{self.path} has no tensor {names[0]!r}, a buffer that is not saved: pass "
                    "materialize() init=(path, function) with a function that makes the buffers of "
                    "a module"
                )

    def _check_kinds(self, name: str, tensor: torch.Tensor, value: FileValue) -> None:
        """Refuse integers and numbers of eight bits for a tensor of other floating-point numbers.
        They lack their scales: torch would only cast them."""
        sources = (part.source for part in value.parts if tensor.is_floating_point())
        for by in sources:
            for source in by.names if isinstance(by, Conversion) else (by,):
                kind = self._kinds[source]
                if kind not in (*_WIDE, NAMES.get(tensor.dtype)):
                    raise ConfigError(
                        f"tensor {source!r} of {self._files[source]} has values of {kind}, which "
                        f"stand for others, and {name} is of {tensor.dtype}: give files of plain "
                        "weights"
                    )

    def lacks(self, model: nn.Module, empty: Collection[str]) -> frozenset[str]:
        """Return the names in ``empty`` whose tensors are in no file under any of their names."""
        found = (names for names, _, (name, _, _) in self._found(model) if not name)
        return frozenset(name for names in found for name in names if name in empty)

    def copy_to(self, model: nn.Module, bring: Bring, link: Link) -> None:
        """Give the tensors of ``model`` the values of the files: those that ``link`` takes are read
        there when they are used; others are copied, file by file, part by part."""
        self._check_ties(model)
        wanted: dict[Path, list[tuple[torch.Tensor, Part]]] = {}
        for tensor, value in self.values_in(model):
            for part in () if link(tensor, value, self.extents_of) else value.parts:
                by = part.source
                first = by.names[0] if isinstance(by, Conversion) else by
                wanted.setdefault(self._files[first], []).append((tensor, part))
        for file, parts in wanted.items():
            with _opened(file) as opened:
                for tensor, (at, source, piece) in parts:
                    if isinstance(source, Conversion):
                        found = self._converted(source, tensor.dtype)[piece]
                    else:
                        found = _read(opened, file, source, piece)
                    place = tensor[at]
                    bring([place])
                    place.copy_(found)

    def extents_of(self, value: FileValue, dtype: torch.dtype) -> list[Extent] | None:
        """Return the bytes of a contiguous tensor with this value, as they lie in the files; None
        if they do not: they are of another dtype, converted, or not in one order."""
        found, end = [], 0
        for at, source, piece in value.parts:
            if isinstance(source, Conversion):
                return None
            ours, theirs = run_of(value.shape, at), run_of(self.shapes[source], piece)
            place = self._places(self._files[source]).get(source)
            if place is None or place.kind.torch_dtype != dtype:
                return None
            if ours is None or theirs is None or ours[0] != end:
                return None
            start, nbytes = (n * dtype.itemsize for n in theirs)
            found.append(Extent(self._sources[self._files[source]], place.start + start, nbytes))
            end += theirs[1]
        return found if end == math.prod(value.shape) else None

    def _places(self, path: Path) -> Mapping[str, Place]:
        """Return where the tensors of a file are, none if it is not laid out as usual."""
        if path not in self._heads:
            self._sources[path] = file = SourceFile(path)
            try:
                self._heads[path] = read_head(file.fd, str(path), file.size)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._heads[path] = {}
        return self._heads[path]

    def values_in(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, FileValue]]:
        """Yield the tensors of ``model`` that the files have, with their values."""
        for _, tensor, (name, _, index) in self._found(model):
            if name:
                yield tensor, self.values[name].indexed(index)

    def _check_ties(self, model: nn.Module) -> None:
        """Refuse files that have several values for one tensor of the model.

        Raises:
            ConfigError: names two.
        """
        for names, _, _ in self._found(model):
            first, *others = [name for name in names if name in self.values][:2] or [""]
            for other in others:
                if not torch.equal(self._whole(first), self._whole(other)):
                    raise ConfigError(
                        f"{self.path} has other values for {other!r} than for {first!r}, which are "
                        "one tensor of this model: build it with tie_word_embeddings=False"
                    )

    def _whole(self, name: str) -> torch.Tensor:
        """Return a tensor that lies whole in a file; empty if it does not."""
        source = self.values[name].parts[0].source
        if isinstance(source, Conversion):
            return torch.empty(0)
        with _opened(self._files[source]) as opened:
            return _read(opened, self._files[source], source, ())

    def _converted(self, conversion: Conversion, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that ``conversion`` makes, of sources cast to ``dtype``."""
        tensors = []
        for name in conversion.names:
            with _opened(self._files[name]) as opened:
                tensors.append(_read(opened, self._files[name], name, ()).to(dtype))
        return conversion.make(tensors)

    def _found(self, model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor, Piece]]:
        """Yield each tensor of ``model``: its names, itself, and its piece of a value, whose name
        is "" if the files have none."""
        pieces = _tile_pieces(model)
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(tensor, []).append(name)
        for tensor, its in names.items():
            shape = tuple(tensor.shape)
            known = ((name, shape, ()) if name in self.values else pieces.get(name) for name in its)
            here = (piece for piece in known if piece is not None and piece[0] in self.values)
            yield its, tensor, next(here, ("", shape, ()))


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is a `PreTrainedModel`, or a `PeftModel` of one."""
    kinds = {(base.__module__.split(".")[0], base.__name__) for base in type(model).__mro__}
    if ("peft", "PeftModel") in kinds:
        return is_of_transformers(cast(Any, model).get_base_model())
    return ("transformers", "PreTrainedModel") in kinds


def _tile_pieces(model: nn.Module) -> dict[str, Piece]:
    return {
        name: piece
        for path, module in model.named_modules(remove_duplicate=False)
        if hasattr(type(module), "tile_pieces")  # of `dynoffload.tile`
        for name, piece in module.tile_pieces(f"{path}." if path else "").items()
    }


def _shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the tensors in ``state_dict()``, and of those that were tiled."""
    state = {n: tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")}
    return state | {name: shape for name, shape, _ in _tile_pieces(model).values()}


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; nothing if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _file_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (INDEX, WHOLE):
        if (path / name).exists():
            return path / name
    raise ConfigError(
        f"the directory {path} has neither {INDEX} nor {WHOLE}: name the directory of the whole "
        "model's files, or a safetensors file"
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
            raise ConfigError(
                f"there is no {path} on this machine: name a directory with model.safetensors or "
                "its index, or such a file (a model of a hub has to be downloaded first); if it is "
                "one of several, complete the download"
            ) from error
        if isinstance(error, OSError):
            raise ConfigError(
                f"cannot read {path}: {error.strerror}: name a file that can be read"
            ) from error
        raise ConfigError(
            f"cannot read {path} as safetensors: {error}: it is damaged or incomplete, or only a "
            "pointer of Git LFS: load it again; or it is of another kind, such as torch.load reads"
        ) from error
