"""Whatever happens to a save, the last complete checkpoint is there, whole, and training can go on.

Saves are killed before every system call that they make, stopped by full and read-only disks and by
Ctrl-C, and pointed at directories that are something else. No process is timed and nobody sleeps.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import script
from torch import nn

import dynoffload
from dynoffload.checkpoint import loading
from dynoffload.checkpoint.tensors import Ordinary
from dynoffload.errors import CheckpointError

KILLED = """
import errno, os, signal
from torch import nn
import dynoffload
from dynoffload.checkpoint import publishing
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
for parameter in model.parameters():
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

def everything():
    return [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]

def set_to(value):
    for tensor in everything():
        tensor.data.fill_(value)

def loaded(target):
    set_to(-1)
    dynoffload.load_checkpoint(model, optimizer, target)
    values = {x for tensor in everything() for x in tensor.data.flatten().tolist()}
    assert len(values) == 1, values  # never of two checkpoints
    return values.pop()

calls = 0
def killing(function, last):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

NAMES = "open close pwrite fsync mkdir chmod link rename scandir unlink rmdir".split()

def kill_everywhere(target):
    before, outcomes = None, []
    for last in range(1, 1000):
        child = os.fork()
        if not child:
            set_to(last)
            for name in NAMES:
                setattr(os, name, killing(getattr(os, name), last))
            publishing._exchange = killing(publishing._exchange, last)
            dynoffload.save_checkpoint(model, optimizer, target)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        if before is None and not target.exists():
            outcomes.append("none")
            set_to(before := 0)
            dynoffload.save_checkpoint(model, optimizer, target)
            assert os.listdir(target.parent) == [target.name]  # nothing is left of the killed one
            (target / "config.json").write_text("{}")
            continue
        now = loaded(target)
        assert now in (before, last), (now, before, last)
        outcomes.append("new" if now == last else "old")
        before = now
        assert (publishing.located(target) / "config.json").exists()
    assert loaded(target) == last
    assert (target / "config.json").exists()
    assert os.listdir(target.parent) == [target.name]
    print(len(outcomes), *sorted(set(outcomes)))

def refuse(one, other):
    if not other.exists():
        raise FileNotFoundError
    raise OSError(errno.EINVAL, "this file system exchanges nothing")

kill_everywhere(Path(sys.argv[1]))
publishing._exchange = refuse
kill_everywhere(Path(sys.argv[2]))
"""


def test_a_save_killed_before_any_system_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The old or the new one, with the files that others have put there; the rest is cleaned up.

    On a file system that cannot exchange, too, of which none may be at hand: there the exchange is
    made to refuse.
    """
    for name in ("exchange", "rename"):
        (tmp_path / name).mkdir()
    done = script(KILLED, tmp_path / "exchange" / "last", tmp_path / "rename" / "last", seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        kills, *outcomes = line.split()
        assert outcomes == ["new", "none", "old"]
        assert int(kills) > 40, "hardly a system call was seen: the test shows nothing"


DISKS = """
import os, resource, signal
from torch import nn
import dynoffload
top = Path(sys.argv[1])
target = top / "runs" / "last"
model = nn.Linear(64, 64)

def refused(path):
    try:
        dynoffload.save_checkpoint(model, None, path)
    except dynoffload.CheckpointError as error:
        print(error, flush=True)
    else:
        raise AssertionError("it was saved")
    assert os.listdir(target.parent) == ["last"], os.listdir(target.parent)

dynoffload.save_checkpoint(model, None, target)
old = model.weight.detach().clone()
with torch.no_grad():
    new = model.weight.add_(1).clone()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
refused(target)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
target.parent.chmod(0o555)
child = os.fork()
if not child:  # as somebody whom modes concern
    if os.geteuid() == 0:
        os.setuid(65534)
    refused(target)
    refused(target.parent / "other")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
target.parent.chmod(0o755)
dynoffload.load_checkpoint(model, None, target)
assert torch.equal(model.weight, old)
model.weight.data.copy_(new)
dynoffload.save_checkpoint(model, None, target)
dynoffload.load_checkpoint(model, None, target)
assert torch.equal(model.weight, new)
"""


def test_a_disk_that_fills_or_is_read_only_is_a_clear_error() -> None:
    """A limit on file sizes stops a write half-way, as a full disk does; both leave nothing behind,
    and what was saved before can be loaded, and replaced once there is room."""
    top = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is closed to others
    try:
        top.chmod(0o755)
        (top / "runs").mkdir()
        done = script(DISKS, top)
    finally:
        shutil.rmtree(top)
    assert done.returncode == 0, done.stderr[-3000:]
    full, *read_only = done.stdout.splitlines()
    assert "cannot save checkpoint" in full
    assert "File too large" in full
    assert "as it was" in full
    assert len(read_only) == 2
    for line in read_only:
        assert "Permission denied" in line
        assert "make the directory above it writable" in line


TINY = """
from torch import nn
import dynoffload
target = Path(sys.argv[1]) / "last"
model = nn.Linear(64, 64)
dynoffload.save_checkpoint(model, None, target)
try:
    dynoffload.save_checkpoint(nn.Linear(1024, 1024), None, target)
except dynoffload.CheckpointError as error:
    print(error.errno, error)
dynoffload.load_checkpoint(model, None, target)
"""


def test_a_disk_without_room_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """On a file system of one megabyte, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if (
        unshare is None
        or subprocess.run(
            [unshare, "-rm", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system lets nobody mount a small file system")
    here = str(Path(__file__).parent)
    body = f"import sys\nsys.path.append({here!r})\nfrom devices import *\n{TINY}"
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", f'{mount} && "$0" -c "$1" {tmp_path}', sys.executable, body],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{errno.ENOSPC} " in done.stdout
    assert "needs 4.0" in done.stdout
    assert "free: free space there, or save to another disk" in done.stdout


def test_an_interrupt_leaves_nothing_but_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as the second piece is written."""
    model = nn.Linear(4, 4)
    path = tmp_path / "run"
    dynoffload.save_checkpoint(model, None, path)
    old = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    held, pieces = Ordinary.held, itertools.count(1)

    def interrupted(self: Ordinary, tensor: torch.Tensor) -> Any:
        if next(pieces) == 2:
            raise KeyboardInterrupt
        return held(self, tensor)

    monkeypatch.setattr(Ordinary, "held", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dynoffload.save_checkpoint(model, None, path)
    assert os.listdir(tmp_path) == ["run"]
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == old


def test_leftovers_go_with_the_next_save_unless_somebody_writes_them(tmp_path: Path) -> None:
    """A directory that another process has locked is a save under way."""
    model = nn.Linear(4, 4)
    for name in (".run.saving-0badcafe", ".run.saving-12345678", ".other.saving-12345678"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    lock = os.open(tmp_path / ".run.saving-12345678", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == [".other.saving-12345678", ".run.saving-12345678", "run"]
    os.close(lock)
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == [".other.saving-12345678", "run"]


# Directories that are something else


def test_directories_above_are_made(tmp_path: Path) -> None:
    """As ``save_pretrained`` makes them: a run of hours is not lost for want of one."""
    path = tmp_path / "run" / "of today" / "last"
    dynoffload.save_checkpoint(model := nn.Linear(2, 2), None, path)
    dynoffload.load_checkpoint(again := nn.Linear(2, 2), None, path)
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        ("no parent", r"directory .*/run/away does not exist, and cannot be made \(Not a dir"),
        ("file", "it is a file; name a directory"),
        ("directories", r"it has directories in it, .* name a directory that is"),
        ("working directory", "it is the working directory"),
        ("weights", r"it has model\.safetensors, which is of no checkpoint"),
    ],
)
def test_what_is_not_a_checkpoint_is_not_replaced(
    make: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the culprit and the remedy, and everything is as it was."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    if make == "no parent":
        path.write_text("mine")
        path = path / "away" / "run"
    elif make == "file":
        path.write_text("mine")
    elif make == "directories":
        (path / "inner").mkdir(parents=True)
    elif make == "weights":
        path.mkdir()
        (path / "model.safetensors").write_text("mine")
    else:
        path = tmp_path
    before = sorted(str(entry) for entry in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=told):
        dynoffload.save_checkpoint(nn.Linear(2, 2), None, path)
    assert sorted(str(entry) for entry in tmp_path.rglob("*")) == before


def test_modes_links_and_files_of_others_stay(tmp_path: Path) -> None:
    """The target may be a link, an empty directory of some mode, or hold single files of others."""
    model = nn.Linear(2, 2)
    path = tmp_path / "run"
    path.mkdir(mode=0o750)
    (path / "tokenizer.json").write_text("{}")
    (tmp_path / "link").symlink_to(path)
    for _ in range(2):
        dynoffload.save_checkpoint(model, None, tmp_path / "link")
        assert path.stat().st_mode & 0o777 == 0o750
        assert (path / "tokenizer.json").read_text() == "{}"
        assert (path / "checkpoint.json").exists()
    assert (tmp_path / "link").is_symlink()
    dynoffload.load_checkpoint(model, None, tmp_path / "link")


def test_an_error_while_it_is_read_back_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails after everything was verified: it says that the model is partly loaded."""
    model = nn.Linear(2, 2)
    dynoffload.save_checkpoint(model, None, tmp_path / "run")
    with monkeypatch.context() as patch:

        def failing(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(loading, "drop_gradients", lambda _: patch.setattr(os, "preadv", failing))
        with pytest.raises(CheckpointError, match=r"half-way .*Input/output.* load it again"):
            dynoffload.load_checkpoint(model, None, tmp_path / "run")
    dynoffload.load_checkpoint(model, None, tmp_path / "run")
