"""No checkpoint, a damaged one, or one of another run: it is refused, and nothing is touched."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_same
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import dynoffload
from dynoffload.errors import CheckpointError, ConfigError

Net = Callable[[], nn.Module]


class Small(nn.Module):
    """Two layers and a buffer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.last = nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 4]`` for the same."""
        return self.last(self.first(x).tanh()) * self.scale.sum()


def trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Make a step, so that there is state."""
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint of several shards, with a scheduler."""
    model = Small()
    optimizer = AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    extra = {"rate": StepLR(optimizer, 2)}
    path = tmp_path / "run"
    dynoffload.save_checkpoint(model, optimizer, path, extra=extra, max_shard_size=150)
    assert len(list(path.iterdir())) > 8
    return path


def state_of(model: nn.Module, optimizer: Optimizer | None) -> Any:
    """Return copies of everything that a load may touch."""
    return copy.deepcopy(
        [
            dict(model.state_dict()),
            [p.grad for p in model.parameters()],
            optimizer.state_dict() if optimizer is not None else {},
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
        ]
    )


@contextmanager
def untouched(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Assert that an error leaves everything as it was."""
    before = state_of(model, optimizer)
    yield
    assert_same(state_of(model, optimizer), before, "state")


# Damage


def test_every_damaged_byte_is_found(saved: Path) -> None:
    """In every file: bits flipped, cut off, something appended, lost, and swapped with another."""
    model = Small()
    optimizer = AdamW(model.parameters())
    trained(model, optimizer)
    extra = {"rate": StepLR(optimizer, 2)}
    generator = random.Random(0)
    files = sorted(saved.iterdir())
    for at, path in enumerate(files):
        whole = path.read_bytes()
        damages: list[bytes | None] = [whole + b"\0", b"", None, files[at - 1].read_bytes()]
        damages += [whole[: generator.randrange(len(whole))] for _ in range(3)]
        for _ in range(8):
            flipped = bytearray(whole)
            flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
            damages.append(bytes(flipped))
        for damaged in damages:
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with untouched(model, optimizer):
                with pytest.raises(CheckpointError) as caught:
                    dynoffload.load_checkpoint(model, optimizer, saved, extra=extra)
            assert str(saved) in str(caught.value)
        path.write_bytes(whole)
    dynoffload.load_checkpoint(model, optimizer, saved, extra=extra)


def resign(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a manifest, and give it the checksum that it should have."""
    manifest = path / "checkpoint.json"
    document = json.loads(manifest.read_bytes())
    change(document["content"])
    document["crc32"] = zlib.crc32(json.dumps(document["content"]).encode())
    manifest.write_bytes(json.dumps(document).encode())


def somewhere(value: Any, generator: random.Random) -> tuple[Any, Any]:
    """Return a place in a nest of lists and dicts."""
    while True:
        key = generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
        item = value[key]
        if not isinstance(item, dict | list) or not item or generator.random() < 0.2:
            return value, key
        value = item


STRANGE = [None, True, -1, 10**30, 0.5, "", "../../etc/passwd", "x", [], {}, [[]], {"$": "tensor"}]
STRANGE += [{"$": "?"}, {"$": "numpy"}, {"$": "size", "items": "ab"}, {"$": "tensor", "name": "x"}]


def test_a_forged_manifest_is_an_error_of_ours_or_another_checkpoint(saved: Path) -> None:
    """With a right checksum: what is read is still verified before anything is touched."""
    whole = (saved / "checkpoint.json").read_bytes()
    generator = random.Random(1)
    refused = 0
    for _ in range(150):
        model = Small()
        optimizer = AdamW(model.parameters())
        (saved / "checkpoint.json").write_bytes(whole)

        def change(content: dict[str, Any]) -> None:
            place, key = somewhere(content, generator)
            place[key] = copy.deepcopy(generator.choice(STRANGE))

        resign(saved, change)
        before = state_of(model, optimizer)
        try:
            dynoffload.load_checkpoint(model, optimizer, saved)
        except CheckpointError:
            refused += 1
            assert_same(state_of(model, optimizer), before, "state")
    assert refused > 75


def test_forged_shards_are_errors_of_ours(saved: Path) -> None:
    """Headers that lie about dtypes, shapes and places, in files with the right checksums."""
    path = min(saved.glob("model-*"))
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    generator = random.Random(2)
    strange = [*STRANGE, "F64", "BF16", [0, 10**18], [5], [-1, 4], [0, 8], {"dtype": "F32"}]
    heads: list[bytes] = [b"", b"{" * 100_000, b"[" * 200_000, b"\xff", b"null", b"[]", b'{"a": 1}']
    for _ in range(60):
        header = json.loads(whole[8 : 8 + length])
        header.pop("__metadata__")
        place, key = somewhere(header, generator)
        place[key] = copy.deepcopy(generator.choice(strange))
        if header != json.loads(whole[8 : 8 + length]):
            heads.append(json.dumps(header).encode())
    files = [len(head).to_bytes(8, "little") + head + whole[8 + length :] for head in heads]
    files += [b"", b"1234", (2**62).to_bytes(8, "little") + whole[8:]]
    model = Small()
    for data in files:
        path.write_bytes(data)

        def change(content: dict[str, Any], data: bytes = data) -> None:
            content["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}

        resign(saved, change)
        with untouched(model, None), pytest.raises(CheckpointError):
            dynoffload.load_checkpoint(model, None, saved)


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_refused(kind: str, saved: Path) -> None:
    """Nor does a pipe make it wait for ever."""
    path = min(saved.glob("extra-*"))
    path.unlink()
    if kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"extra-.* has \d+ bytes, and \d+ were"):
        dynoffload.load_checkpoint(Small(), None, saved)


def test_nothing_is_ever_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `pickle` nor by `torch.load`."""
    import pickle

    def unpickle(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, unpickle)
    model = Small()
    dynoffload.load_checkpoint(model, AdamW(model.parameters()), saved)


# Other things than checkpoints


def test_where_there_is_none(tmp_path: Path, saved: Path) -> None:
    """A missing directory, an empty one, a file, and weights without the rest."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    weights = tmp_path / "weights"
    shutil.copytree(saved, weights)
    (weights / "checkpoint.json").unlink()
    for name, told in (
        ("nowhere", "there is none; name the directory"),
        ("empty", "it has no checkpoint.json"),
        ("file", "it is a file; name the directory"),
        ("weights", r"no save of dynoffload made it; weights alone are read by model\.load"),
    ):
        with pytest.raises(CheckpointError, match=told):
            dynoffload.load_checkpoint(Small(), None, tmp_path / name)


def test_a_newer_format_is_named(saved: Path) -> None:
    document = json.loads((saved / "checkpoint.json").read_bytes())
    (saved / "checkpoint.json").write_text(json.dumps({**document, "version": 7}))
    with pytest.raises(CheckpointError, match=r"of format 7 and this dynoffload reads 2: .*later"):
        dynoffload.load_checkpoint(Small(), None, saved)
    (saved / "checkpoint.json").write_text(json.dumps({**document, "format": "other"}))
    with pytest.raises(CheckpointError, match="is not of dynoffload"):
        dynoffload.load_checkpoint(Small(), None, saved)


# Other runs


def more() -> nn.Module:
    """Return a network with a layer more."""
    model = Small()
    model.extra = nn.Linear(2, 2)
    return model


def fewer() -> nn.Module:
    """Return a network with a layer less."""
    model = Small()
    model.last = nn.Identity()  # type: ignore[assignment]
    return model


def tied() -> nn.Module:
    """Return a network of which two tensors are one."""
    model = Small(4)
    model.last.weight = model.first.weight
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (more, r"is not of this Small: missing 'extra\.weight', 'extra\.bias'\. Build the model"),
        (fewer, r"unexpected 'last\.weight', 'last\.bias'\. "),
        (
            lambda: Small(7),
            r"different 'first\.weight' \(F32\[6, 4\] there, F32\[7, 4\] here\), 'first\.bias' "
            r"\(.*\), 'last\.weight' \(.*\)\. ",
        ),
        (
            lambda: Small().double(),
            r"'first\.weight' \(F32\[6, 4\] there, F64\[6, 4\] here\).* 2 more",
        ),
    ],
)
def test_a_model_that_differs_is_named(make: Net, told: str, saved: Path) -> None:
    """By the first names of each sort, and with the remedy."""
    model = make()
    with untouched(model, None), pytest.raises(CheckpointError, match=told):
        dynoffload.load_checkpoint(model, None, saved)


def test_ties_must_be_the_same(tmp_path: Path) -> None:
    """One tensor cannot take two contents, and two tensors of one would part in the next step."""
    dynoffload.save_checkpoint(tied(), None, tmp_path / "tied")
    dynoffload.save_checkpoint(Small(4), None, tmp_path / "apart")
    for make, path, told in (
        (lambda: Small(4), "tied", r"'last\.weight' \(tied to 'first\.weight' there, F32.* here\)"),
        (tied, "apart", r"'last\.weight' \(F32.* there, tied to 'first\.weight' here\)"),
    ):
        with pytest.raises(CheckpointError, match=told):
            dynoffload.load_checkpoint(make(), None, tmp_path / path)


class Ordered(nn.Module):
    """Layers of which two share their weights, registered in a given order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4, bias=False))
        self.head.weight = self.embed.weight


def test_tied_tensors_load_whichever_is_registered_first(tmp_path: Path) -> None:
    """Also from a file that has the weights under the other name."""
    model, other = Ordered("embed", "head", "norm"), Ordered("norm", "head", "embed")
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    dynoffload.load_checkpoint(other, None, tmp_path / "run")
    assert_same(other.state_dict(), model.state_dict(), "weights")
    other.norm.weight = other.head.weight
    with pytest.raises(
        CheckpointError, match=r"'norm\.weight' \(.* there, tied to 'embed\.weight'"
    ):
        dynoffload.load_checkpoint(other, None, tmp_path / "run")


def two_groups(model: Any, swapped: bool = False) -> Optimizer:
    """Return an optimizer with a group for each layer."""
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters()}]
    return AdamW(groups[::-1] if swapped else groups)


def test_an_optimizer_that_differs_is_named(saved: Path, tmp_path: Path) -> None:
    """Its type, the number of its groups, or what is in them."""
    model = Small()
    for optimizer, told in (
        (
            SGD(model.parameters(), lr=0.1),
            r"is not of this SGD: different 'the type' \(AdamW there, SGD here\)\. Make",
        ),
        (Adam(model.parameters()), r"\(AdamW there, Adam here\)"),
        (two_groups(model), r"'the groups' \(1 there, 2 here\)"),
    ):
        with untouched(model, optimizer), pytest.raises(CheckpointError, match=told):
            dynoffload.load_checkpoint(model, optimizer, saved)
    dynoffload.save_checkpoint(model, two_groups(model), tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"'last\.weight' \(group 1 there, group 0 here\)"):
        dynoffload.load_checkpoint(model, two_groups(model, swapped=True), tmp_path / "two")


def test_what_else_differs_is_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An extra of another name or type; one that is left out is warned of."""
    model = Small()
    optimizer = AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"of this extra: missing 'scaler'.* \('rate'\)"):
        dynoffload.load_checkpoint(
            model, optimizer, saved, extra={"scaler": torch.amp.GradScaler("cpu")}
        )
    with pytest.raises(CheckpointError, match=r"'rate' \(StepLR there, ExponentialLR here\)"):
        dynoffload.load_checkpoint(
            model, optimizer, saved, extra={"rate": ExponentialLR(optimizer, 0.5)}
        )
    dynoffload.load_checkpoint(model, optimizer, saved)
    assert "also has the state of rate, which is not loaded" in caplog.text


# What cannot be saved


def test_what_json_cannot_say_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    """By its path within the state."""
    model = Small()
    for state, told in (
        (
            {"deep": [1, print]},
            r"extra it\.deep\.1 is a builtins\.builtin_function_or_method, which",
        ),
        ({"rows": np.array(["a"])}, r"extra it\.rows is a numpy\.ndarray"),
        ({"t": torch.eye(2).to_sparse()}, r"'extra it\.t' is of layout torch\.sparse_coo"),
        ({"t": torch.empty(1, device="meta")}, r"'extra it\.t' is on the meta device"),
    ):
        it = SimpleNamespace(state_dict=partial(copy.copy, state), load_state_dict=None)
        with pytest.raises(CheckpointError, match=told):
            dynoffload.save_checkpoint(model, None, tmp_path / "run", extra={"it": it})
    foreign = AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"shape \[3\] that is not of this model"):
        dynoffload.save_checkpoint(model, foreign, tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"extra=\{'it': \.\.\.\} has no state_dict\(\) .* being of type int: pass",
    ):
        dynoffload.save_checkpoint(model, None, tmp_path / "run", extra={"it": 3})
    with pytest.raises(ConfigError, match="max_shard_size"):
        dynoffload.save_checkpoint(model, None, tmp_path / "run", max_shard_size=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [dynoffload.save_checkpoint, dynoffload.load_checkpoint])
def test_arguments_of_another_kind_or_order_are_refused(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    model = Small()
    optimizer = SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"\(model, optimizer, directory\).* not str and Small"):
        call(str(tmp_path / "run"), model, optimizer)
    scheduler = StepLR(optimizer, 1)
    for extra in (scheduler, [scheduler], {0: scheduler}):
        with pytest.raises(ConfigError, match=r"as in extra=\{'scheduler': scheduler\}: pass"):
            call(model, optimizer, tmp_path / "run", extra=extra)
    assert not list(tmp_path.iterdir())
