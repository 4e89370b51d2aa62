"""Ranks keep to their memory nodes: on machines made of files, and with this one's own cores."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.memory.cores import cores_of_list, list_of_cores
from dynoffload.runtime import offload
from dynoffload.runtime.ranks import binding
from dynoffload.runtime.ranks.binding import Binding, binding_for, bound

ALL = set(range(16))
NODES = {0: "0-3,8-11", 1: "4-7,12-15"}


def rank(number: int, ranks: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks)}


def machine(root: Path, cores: dict[int, str], devices: dict[str, str] | None = None) -> Path:
    """Write a /sys with nodes and devices, and return its root."""
    for node, listed in cores.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    for address, node_of_device in (devices or {}).items():
        folder = root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node_of_device}\n")
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of eight cores, an accelerator on each, and one on none."""
    return machine(
        tmp_path, NODES, {"0000:00:00.0": "0", "0000:01:00.0": "1", "0000:0f:00.0": "-1"}
    )


def of(root: Path, number: int, ranks: int, address: str | None = None) -> Binding | None:
    return binding_for(
        address, affinity=ALL, launcher=ALL, environment=rank(number, ranks), root=root
    )


def test_lists_of_cores_are_the_kernels() -> None:
    for text in ("0-3,8-11", "5", "", "0,2,4-5"):
        assert list_of_cores(cores_of_list(text)) == text


def test_a_rank_is_bound_to_the_node_of_its_accelerator(two_nodes: Path) -> None:
    found = of(two_nodes, 0, 2, "0000:01:00.0")
    assert found == Binding((1,), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
    assert str(found) == "bound to memory node 1 (cores 4-7,12-15)"
    assert of(two_nodes, 1, 2, "0000:00:00.0") == Binding(
        (0,), frozenset({0, 1, 2, 3, 8, 9, 10, 11})
    )
    assert of(two_nodes, 0, 2, "0000:0f:00.0") is None  # it hangs on no node


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        (1, [None]),  # all of them are its own
        (2, [(0,), (1,)]),
        (3, [(0,), (0,), (1,)]),
        (4, [(0,), (0,), (1,), (1,)]),
    ],
)
def test_without_one_ranks_share_the_nodes(
    two_nodes: Path, ranks: int, nodes: list[tuple[int, ...] | None]
) -> None:
    found = [of(two_nodes, number, ranks) for number in range(ranks)]
    assert [one and one.nodes for one in found] == nodes


def test_fewer_ranks_than_nodes_take_several(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"})
    first, second = (of(root, number, 2) for number in (0, 1))
    assert first == Binding((0, 1), frozenset(range(8)))
    assert str(first) == "bound to memory nodes 0, 1 (cores 0-7)"
    assert second == Binding((2, 3), frozenset(range(8, 16)))


def test_what_a_launcher_has_set_is_never_widened(two_nodes: Path) -> None:
    def found(affinity: set[int], launcher: set[int], address: str | None = None) -> Binding | None:
        return binding_for(
            address,
            affinity=affinity,
            launcher=launcher,
            environment=rank(0, 2),
            root=two_nodes,
        )

    device = "0000:01:00.0"
    assert found({2, 3, 4, 5}, ALL, device) == Binding((1,), frozenset({4, 5}))
    assert found({0, 1}, ALL, device) is None  # bound elsewhere
    assert found({4, 5}, ALL, device) is None  # bound so already
    assert found({2, 3, 4, 5}, ALL) is None  # somebody has divided the cores
    assert found({2, 3, 4, 5}, {2, 3, 4, 5}) == Binding((0,), frozenset({2, 3}))  # a container's


def test_nothing_is_bound_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    one = machine(tmp_path / "one", {0: "0-15"}, {"0000:00:00.0": "0"})
    assert of(one, 0, 2) is None
    assert of(one, 0, 2, "0000:00:00.0") is None
    memory_only = machine(tmp_path / "memory", {0: "0-15", 1: ""})
    assert of(memory_only, 1, 2) is None
    assert of(tmp_path / "nothing", 0, 2) is None
    two = machine(tmp_path / "two", NODES)
    for environment in ({}, {"LOCAL_RANK": "0"}, rank(2, 2), {**rank(0, 2), "LOCAL_RANK": "x"}):
        assert binding_for(None, affinity=ALL, environment=environment, root=two) is None


# With this machine's cores


@pytest.fixture
def cores() -> Iterator[list[int]]:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core cannot be divided")
    yield sorted(before)
    os.sched_setaffinity(0, before)


class Waiting:
    """A thread that says what cores it has when it is asked."""

    def __init__(self, own: set[int] | None = None) -> None:
        self._own, self.ready, self._end = own, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(10)

    def _run(self) -> None:
        if self._own:
            os.sched_setaffinity(0, self._own)
        self.ready.set()
        self._end.wait(60)

    @property
    def cores(self) -> set[int]:
        assert self.thread.native_id is not None
        return os.sched_getaffinity(self.thread.native_id)

    def end(self) -> None:
        self._end.set()
        self.thread.join(10)


def test_all_threads_are_bound_and_have_their_cores_back(cores: list[int]) -> None:
    first, last = {cores[0]}, {cores[-1]}
    before, its_own, same = Waiting(), Waiting(first), Waiting(last)
    with bound(Binding((1,), frozenset(last))) as words:
        assert words == f"bound to memory node 1 (cores {cores[-1]})"
        later = Waiting()
        assert os.sched_getaffinity(0) == before.cores == later.cores == same.cores == last
        assert its_own.cores == first
    everyone = set(cores)
    assert os.sched_getaffinity(0) == before.cores == later.cores == everyone
    assert (its_own.cores, same.cores) == (first, last)
    for one in (before, its_own, same, later):
        one.end()


def test_cores_come_back_after_an_error(cores: list[int]) -> None:
    with (
        pytest.raises(RuntimeError, match="in the block"),
        bound(Binding((0,), frozenset(cores[:1]))),
    ):
        raise RuntimeError("in the block")
    assert os.sched_getaffinity(0) == set(cores)


def test_a_system_that_refuses_is_said_once_and_nothing_is_bound(
    cores: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    idle, setting = Waiting(), os.sched_setaffinity

    def refuse(thread: int, wanted: set[int]) -> None:
        if thread == idle.thread.native_id:
            raise PermissionError(1, "Operation not permitted")
        setting(thread, wanted)

    monkeypatch.setattr(binding.os, "sched_setaffinity", refuse)
    with bound(Binding((0,), frozenset(cores[:1]))) as words:
        assert words == ""
        assert os.sched_getaffinity(0) == idle.cores == set(cores)
    monkeypatch.undo()
    idle.end()
    assert [one.message for one in caplog.records] == [
        f"threads cannot be bound to cores {cores[0]} (Operation not permitted): memory may lie on "
        "a far node; config={'numa': 'off'} binds nothing"
    ]


@pytest.mark.parametrize("numa", ["auto", "off"])
def test_a_session_of_a_rank_is_bound_and_says_so(
    numa: str,
    cores: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = len(cores) // 2
    root = machine(tmp_path, {0: list_of_cores(cores[:half]), 1: list_of_cores(cores[half:])})
    everyone = set(cores)
    fake = functools.partial(binding_for, launcher=everyone, environment=rank(1, 2), root=root)
    monkeypatch.setattr(offload, "binding_for", fake)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    plain = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    plain.load_state_dict(model.state_dict())
    inputs = torch.randn(4, 64)
    with (
        caplog.at_level(logging.INFO, "dynoffload"),
        dynoffload.offload(model, budget="64MiB", pilot=None, config={"numa": numa}),
    ):
        wanted = set(cores[half:]) if numa == "auto" else everyone
        assert os.sched_getaffinity(0) == wanted
        model(inputs).sum().backward()
    assert os.sched_getaffinity(0) == everyone
    words = f", bound to memory node 1 (cores {list_of_cores(cores[half:])})"
    assert any(words in one.message for one in caplog.records) is (numa == "auto")
    plain(inputs).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_an_option_that_is_none_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"numa='on' is not an option"),
        dynoffload.offload(nn.Linear(4, 4), budget="1MiB", config={"numa": "on"}),
    ):
        pass


_RANK = """
import os, sys
from pathlib import Path
from dynoffload.runtime.ranks.binding import binding_for, bound
with bound(binding_for(None, root=Path(sys.argv[1]))) as words:
    print(f"rank {os.environ['LOCAL_RANK']} {words} {sorted(os.sched_getaffinity(0))}", flush=True)
"""


@pytest.mark.slow
def test_ranks_of_torchrun_have_the_cores_of_their_launcher(
    cores: list[int], tmp_path: Path
) -> None:
    halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    root = machine(tmp_path, {node: list_of_cores(half) for node, half in enumerate(halves)})
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(root)], capture_output=True, text=True, timeout=120, check=True
    )
    for node, half in enumerate(halves):
        words = f"rank {node} bound to memory node {node} (cores {list_of_cores(half)}) {half}"
        assert words in done.stdout
