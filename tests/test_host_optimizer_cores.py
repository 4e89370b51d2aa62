"""Which cores update parameters, on machines made of files; and what the machine's rates decide."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from emulated import emulated
from host_reference import Pair, odd, words
from torch.optim import SGD, AdamW

from dynoffload.memory.cores import Cores, cores_for, cores_of_list, node_of, nodes
from dynoffload.optim import HostOptimizer
from dynoffload.optim.choosing import Rates, plan_by
from dynoffload.optim.crew import Crew

CPU = torch.device("cpu")


def machine(root: Path, cores: dict[int, str], devices: dict[str, str]) -> Path:
    """Write a /sys with nodes and devices, and return its root."""
    for node, listed in cores.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    for address, node in devices.items():
        folder = root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of eight cores, and four accelerators that are on them in turn."""
    devices = {f"0000:0{n}:00.0": str(n % 2) for n in range(4)}
    return machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, {**devices, "0000:0f:00.0": "-1"})


def test_lists_of_cores() -> None:
    assert cores_of_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cores_of_list("5") == {5}
    assert cores_of_list("\n") == set()
    with pytest.raises(ValueError, match="invalid literal"):
        cores_of_list("none")


def test_nodes(two_nodes: Path) -> None:
    assert nodes(two_nodes) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert node_of("0000:01:00.0", two_nodes) == 1
    assert node_of("0000:0f:00.0", two_nodes) == -1
    assert node_of("0000:aa:00.0", two_nodes) == -1
    assert node_of(None, two_nodes) == -1


def test_one_process_takes_the_cores_of_its_accelerators_node(two_nodes: Path) -> None:
    found = cores_for("0000:01:00.0", affinity=range(16), environment={}, root=two_nodes)
    assert found == Cores((4, 5, 6, 7, 12, 13, 14, 15), 1)


def test_an_affinity_is_kept_to(two_nodes: Path) -> None:
    bound = cores_for("0000:01:00.0", affinity={3, 4, 5}, environment={}, root=two_nodes)
    assert bound == Cores((4, 5), 1)
    elsewhere = cores_for("0000:01:00.0", affinity={0, 1}, environment={}, root=two_nodes)
    assert elsewhere == Cores((0, 1), -1)


def test_ranks_of_one_node_share_its_cores(two_nodes: Path) -> None:
    """Accelerators 0 and 2 are on node 0, 1 and 3 on node 1."""
    peers = [f"0000:0{n}:00.0" for n in range(4)]
    found = [
        cores_for(
            peers[rank],
            peers,
            affinity=range(16),
            environment={"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": str(rank)},
            root=two_nodes,
        )
        for rank in range(4)
    ]
    assert [one.numbers for one in found] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]


@pytest.mark.parametrize("ranks", [1, 3, 8, 20])
def test_without_nodes_ranks_divide_all_cores(ranks: int, tmp_path: Path) -> None:
    found = [
        cores_for(
            None,
            affinity=range(8),
            environment={"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            root=tmp_path,
        ).numbers
        for rank in range(ranks)
    ]
    taken = [core for one in found for core in one]
    assert set(taken) == set(range(8))
    assert all(found)
    if ranks <= 8:
        assert len(taken) == 8


def test_variables_that_are_no_numbers(tmp_path: Path) -> None:
    environment = {"LOCAL_WORLD_SIZE": "many", "LOCAL_RANK": ""}
    assert cores_for(None, affinity={1}, environment=environment, root=tmp_path).numbers == (1,)


def test_a_crew_has_threads_and_cores_of_its_own() -> None:
    """Those of the process and of other threads stay as they are."""
    before = torch.get_num_threads()
    core = min(os.sched_getaffinity(0))
    crew = Crew(CPU, Cores((core,), -1), threads=3)
    assert crew.do(torch.get_num_threads) == 3
    assert crew.do(os.sched_getaffinity, 0) == {core}
    assert torch.get_num_threads() == before
    other = Crew(CPU, Cores((core,), -1))
    assert other.do(torch.get_num_threads) == 1
    for one in (crew, other):
        one.close()


# Where updates are computed


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        (Rates(1e9, 25e9, 25e9, 20e9), "host"),  # kernel 1 ns an element, link 24 bytes in 0.6 ns
        (Rates(1e8, 25e9, 25e9, 20e9), "device"),
        (Rates(1e9, 1e9, 1e9, 1e9), "host"),
    ],
)
def test_the_place_follows_from_rates(rates: Rates, place: str) -> None:
    entries = list(Pair().ours._entries.values())
    elements = sum(entry.numel for entry in entries)
    plan = plan_by(rates, entries)
    assert plan.device_s == pytest.approx(12 * elements / rates.both_bytes_per_s)
    kernel, up = elements / rates.elements_per_s, 2 * elements / rates.in_bytes_per_s
    assert plan.host_s == pytest.approx(2 * elements / rates.out_bytes_per_s + max(kernel, up))
    assert (plan.host_s <= plan.device_s) == (plan.place == "host")
    if place == "device":
        assert plan.place == place


def test_auto_measures_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with emulated() as queues:
        model = odd()
        with caplog.at_level(logging.INFO, "dynoffload"):
            optimizer = HostOptimizer(model.parameters(), AdamW, queues=queues)
        plan = optimizer.plan
        assert plan.rates is not None
        assert plan.rates.elements_per_s > 1e5
        assert optimizer.place == plan.place
        assert plan.place == ("host" if plan.host_s <= plan.device_s else "device")
        said = caplog.messages[-1]
        for part in ("AdamW", f"updates on the {plan.place}", "million elements/s", "threads"):
            assert part in said
        optimizer.close()
        assert queues.host_bytes == 0


def test_on_the_cpu_nothing_is_measured() -> None:
    optimizer = HostOptimizer(odd().parameters(), SGD, lr=0.1)
    assert optimizer.place == "host"
    assert optimizer.plan.rates is None
    assert "no link" in optimizer.plan.reason


def test_other_ranks_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO, "dynoffload"):
        model = odd()
        optimizer = HostOptimizer(model.parameters(), AdamW)
        model(words(1)[0]).backward()
        optimizer.step()
    assert not caplog.messages
