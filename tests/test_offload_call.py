"""The call of ``offload()``: what it returns before ``with``, its arguments, its plan line."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, footprint_of, small
from torch import nn
from torch.optim import AdamW

import dynoffload
from dynoffload.config import OffloadConfig, set_defaults
from dynoffload.errors import BudgetError, ConfigError, DynOffloadError
from dynoffload.memory.filesystems import filesystem_of
from dynoffload.reporting.summary import verdict


def block() -> Any:
    """Return a block of a small model that was not entered."""
    model = small()
    return dynoffload.offload(model, budget=footprint_of(model), config=SMALL_PAGES)


# A forgotten ``with``


def test_a_block_that_nobody_entered_is_warned_of_where_it_was_made() -> None:
    with pytest.warns(RuntimeWarning, match="nothing was offloaded: write 'with") as caught:
        block()
    assert [warning.filename for warning in caught] == [__file__]
    line = inspect.getsourcelines(block)[1] + len(inspect.getsourcelines(block)[0]) - 1
    assert caught[0].lineno == line


def test_a_block_is_entered_once_and_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = block()
        with once as session:
            assert session.stats.empty
        with pytest.raises(ConfigError, match="entered before: each 'with' needs"):
            with once:
                pytest.fail("the block must not begin")
        del once


@pytest.mark.parametrize("left_by", ["close", "with", "both"])
def test_a_block_that_is_started(left_by: str) -> None:
    """`close` ends it, once, and inside ``with`` too."""
    model = small()
    block = dynoffload.offload(model, budget=footprint_of(model), config=SMALL_PAGES)
    if left_by == "close":
        session = block.start()
        assert session.paging
        session.close()
    else:
        with block as session:
            assert session.paging
            if left_by == "both":
                session.close()
                assert not session.paging
    session.close()
    assert not session.paging
    assert not model._forward_pre_hooks
    with dynoffload.offload(model, budget=footprint_of(model), config=SMALL_PAGES) as another:
        assert another.paging


# Arguments


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        ("8", ConfigError, "^budget='8': '8' has no unit"),
        (["8GiB"], ConfigError, r"^budget=\['8GiB'\]: .* is an int or a text"),
        (1j, ConfigError, "^budget=1j: .* is an int or a text"),
        (0, BudgetError, "a budget of 0 B cannot hold .* raise the budget to at least"),
    ],
)
def test_a_budget_that_is_none_names_the_remedy(
    budget: Any, error: type[DynOffloadError], text: str
) -> None:
    with pytest.raises(error, match=text):
        with dynoffload.offload(small(), budget=budget, config=SMALL_PAGES):
            pytest.fail("the block must not begin")


def test_each_quantity_is_named_by_its_argument() -> None:
    model = small()
    with pytest.raises(ConfigError, match=r"^max_bytes='': "):
        dynoffload.tile(model, max_bytes="")
    with pytest.raises(ConfigError, match=r"^max_shard_size=\[\]: "):
        dynoffload.save_checkpoint(model, None, "nowhere", max_shard_size=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^--budget='': "):
        set_defaults(budget="")
    with pytest.raises(ConfigError, match=r"^tile_bytes=1j: "):
        dynoffload.HostOptimizer(model.parameters(), AdamW, tile_bytes=1j)  # type: ignore[arg-type]


# Options


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        *(
            (name, value, "is neither True nor False: pass one of them")
            for name, value in [
                ("rollback", "no"),
                ("slices", "false"),
                ("page_activations", 0),
                ("step_aside", None),
                ("debug", 0.5),
            ]
        ),
        ("heap_slack_bytes", None, "is an int or a text like '8GiB', not None"),
        ("heap_slack_bytes", -1, "cannot be negative"),
        ("heap_slack_bytes", "much", "write a number and a unit"),
        ("min_paged_bytes", 0.5, "is an int or a text like '8GiB', not 0.5: make it whole"),
        ("min_paged_bytes", 0, "must be at least 1"),
        ("page_bytes", True, "is an int or a text"),
        ("page_bytes", "96KiB", "is not a power of two between"),
        ("policy", "dtr", "is not an option: known are auto, pilot, repeat, on-demand"),
        ("rank_timeout", "long", "is not a number of seconds"),
        ("rank_timeout", True, "is not a number of seconds"),
        ("rank_timeout", float("nan"), "is not a number of seconds"),
    ],
)
def test_an_option_of_another_kind_is_named(option: str, value: object, text: str) -> None:
    """Nothing is taken for what it may have been meant as."""
    with pytest.raises(ConfigError, match=rf"^{option}=.*{re.escape(text)}"):
        OffloadConfig.of({option: value})


# The plan line


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or filesystem_of(Path("/dev/shm")) != "tmpfs",
    reason="/dev/shm is no tmpfs here",
)
def test_the_plan_line_says_why_it_does_not_spill_where_temporary_files_lie(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynoffload")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/dev/shm")
    with block():
        pass
    plan = next(line for line in caplog.messages if "spilling to" in line)
    assert "spilling to /var/tmp (as the one for temporary files, /dev/shm, is on tmpfs" in plan
    caplog.clear()
    model = small()
    asked = {"budget": footprint_of(model), "spill_dir": "/var/tmp", "config": SMALL_PAGES}
    with dynoffload.offload(model, **asked):  # for which there is no reason to give
        pass
    assert "spilling to /var/tmp, policy" in caplog.text


def test_a_budget_is_shown_as_it_was_typed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dynoffload")
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with dynoffload.offload(model, optimizer, budget="2MB") as session:
        assert "under 2MB on the" in caplog.text
        assert "under 2MB on the" in repr(session)
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
    assert "budget of 2MB" in verdict(session.log)
    with (
        pytest.raises(BudgetError, match="a budget of 70kB cannot hold"),
        dynoffload.offload(model, optimizer, budget="70kB"),
    ):
        pass


@pytest.mark.parametrize("budget", [8, 16, 8000])
def test_a_small_number_as_a_budget_is_told_to_have_a_unit(budget: int) -> None:
    """As the text is: a user who writes 16 means gigabytes."""
    model = nn.Linear(128, 128)
    hint = f"write '{budget}GiB' or '{budget}MB'"
    with pytest.raises(ConfigError, match=hint):
        dynoffload.offload(model, budget=str(budget)).__enter__()
    with pytest.raises(BudgetError, match=hint):
        dynoffload.offload(model, budget=budget).__enter__()


def test_a_model_that_is_called_in_parts_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = AdamW(model.parameters())
    config = {**SMALL_PAGES, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget=footprint_of(model) // 2, config=config):
        for _ in range(3):
            model[3:](model[:3](torch.ones(2, 64))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("this Sequential itself is not called, only parts of it") == 1
