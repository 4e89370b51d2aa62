"""transformers' Trainer with `OffloadCallback`: whatever the Trainer does, to the same bits.

Each test lets a Trainer train one model plainly and a copy under a quarter of its footprint.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged, each_backend, network, quarter, samples, without_times
from exactness import SMALL_PAGES, assert_ordinary, assert_same
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from trainers import EVERYTHING, assert_same_outcome, llama, trainer

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.memory.local import wrapped
from dynoffload.memory.pager import in_user_mode, probe

pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from dynoffload.integrations.saving import readable_state
from dynoffload.integrations.transformers import OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(
    out: Path, *callbacks: TrainerCallback, make: Callable[[], nn.Module] = network, **options: Any
) -> list[Trainer]:
    """Return two Trainers that have trained, one of them under a quarter of the footprint."""
    found = []
    for name, ours in (("plain", []), ("paged", [OffloadCallback(**quarter("auto", make=make))])):
        found.append(trainer(make(), out / name, *ours, *callbacks, **options))
        found[-1].train()
    return found


def test_a_line_says_what_begins_and_one_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the error stream, above the bar, where nobody has configured logging."""
    offload = OffloadCallback(**{**quarter("pager"), "budget": "600kB"})
    client = trainer(network(), tmp_path, offload, disable_tqdm=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    client.train()
    assert offload.session is not None
    lines = capsys.readouterr().err.splitlines()
    begun, ended = [line for line in lines if line.startswith("dynoffload: ")]
    name = type(client.model).__name__
    assert begun.startswith(f"dynoffload: {name} is trained under 600kB by policy pilot: ")
    steps = offload.session.stats
    assert f"{name}, {len(steps)} steps: median step" in ended
    for part in ("of it in", "read and", "written a step", "of the budget of 600kB"):
        assert part in ended


def test_who_configures_logging_gets_log_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="dynoffload")
    trainer(network(), tmp_path, OffloadCallback(**quarter("pager"))).train()
    assert "steps: median step" in caplog.text
    assert "dynoffload: " not in capsys.readouterr().err


@each_backend
@pytest.mark.parametrize(
    "options",
    [{"optim": "adamw_torch", "max_grad_norm": 0.0}, EVERYTHING],
    ids=["bare", "everything"],
)
def test_a_trainer_trains_to_the_same_bits(
    backend: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Logs, weights, optimizer state, and each file of weights and state that was saved."""
    plain = trainer(network(), tmp_path / "plain", **options)
    plain.train()
    offload = OffloadCallback(**quarter(backend))
    paged = trainer(network(), tmp_path / "paged", offload, **options)
    paged.train()
    assert_paged(offload.session, steps=4)
    assert_same_outcome(paged, plain)
    saved = sorted(p.relative_to(tmp_path / "plain") for p in tmp_path.glob("plain/*/*.*"))
    assert bool(saved) is (options is EVERYTHING)
    for file in saved:
        ours, theirs = tmp_path / "paged" / file, tmp_path / "plain" / file
        if file.suffix == ".safetensors":
            assert_same(load_file(ours), load_file(theirs), str(file))
        elif file.name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            found = [torch.load(path, weights_only=False) for path in (ours, theirs)]
            if file.name == "rng_state.pth":
                found = [each["cpu"] for each in found]
            assert_same(*found, str(file))


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """This thread without the right to handle the kernel's own page faults, if it has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the sets, of this thread
    held = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~(1 << 19)  # CAP_SYS_PTRACE, effective
    assert libc.capset(header, fewer) == 0
    try:
        if probe() or not in_user_mode():
            pytest.skip("the pager never works in user mode here")
        yield
    finally:
        assert libc.capset(header, held) == 0


@pytest.mark.usefixtures("unprivileged")
def test_a_checkpoint_is_written_where_system_calls_do_not_wait(tmp_path: Path) -> None:
    """As for most users: a write from absent memory would fail with EFAULT. Weights stay tied."""

    def tied() -> nn.Module:
        model = llama(hidden_size=512, tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    trained(tmp_path, make=tied, **{**EVERYTHING, "max_steps": 2})
    found = []
    for name in ("plain", "paged"):
        at = tmp_path / name / "checkpoint-2"
        state = torch.load(at / "optimizer.pt", weights_only=True)
        found.append((load_file(at / "model.safetensors"), state))
    assert_same(found[1], found[0], "checkpoint")


def maps_a_file(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= tensor.data_ptr() < end:
            return inode != "0"
    return False


class Held(nn.Module):
    """A frozen wrapper of two tensors of the same size."""

    def __init__(self) -> None:
        super().__init__()
        high = torch.randn(64, 64)
        self.weight = nn.Parameter(TwoTensor(high, high.clone()), requires_grad=False)


@pytest.mark.usefixtures("unprivileged")
def test_what_wrappers_hold_is_copied_to_files_too() -> None:
    model = nn.Sequential(*(Held() for _ in range(6)), nn.Linear(64, 64))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    config = {**SMALL_PAGES, "step_aside": False, "backend": "pager"}
    with dynoffload.offload(model, budget="150kB", config=config) as session:
        with readable_state(session):
            state = model.state_dict()
        assert all(maps_a_file(part) for one in state.values() for part in wrapped(one))
    assert {type(one) for one in state.values()} == {TwoTensor, torch.Tensor}
    assert_same(dict(state), before, "state")


@pytest.mark.parametrize("offloaded", [(True, False), (False, True)])
def test_a_run_is_resumed_from_a_checkpoint(offloaded: tuple[bool, bool], tmp_path: Path) -> None:
    """Saved under a budget and resumed without, and the other way round."""
    whole = trainer(network(), tmp_path / "whole", **EVERYTHING)
    whole.train()

    def part(paged: bool, **options: Any) -> Trainer:
        callbacks = [OffloadCallback(**quarter())] if paged else []
        return trainer(network(), tmp_path / "part", *callbacks, **{**EVERYTHING, **options})

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    first = part(offloaded[0])
    first.add_callback(Stop())
    first.train()
    assert first.state.global_step == 2
    second = part(offloaded[1])
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    for client in (second, whole):
        del client.state.log_history[-1]["train_loss"]  # of the steps since it was resumed
    assert_same_outcome(second, whole)


def test_training_that_stops_early_has_its_best_model(tmp_path: Path) -> None:
    """The Trainer loads the best weights into the model while it is managed."""
    options = {
        **EVERYTHING,
        "learning_rate": 0.5,  # so that it gets worse
        "lr_scheduler_type": "constant",
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 12,
        "load_best_model_at_end": True,
    }
    found = trained(tmp_path, EarlyStoppingCallback(1), **options)
    assert found[0].state.global_step < 12
    assert found[0].state.best_global_step < found[0].state.global_step
    assert_same_outcome(found[1], found[0])
    metrics = [without_times(client.evaluate()) for client in found]
    assert_same(metrics[1], metrics[0], "evaluation")


class Break(TrainerCallback):  # type: ignore[misc]
    """Raises ``error`` at the end of step 2, once."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_loop_that_fails_leaves_ordinary_tensors(error: BaseException, tmp_path: Path) -> None:
    """The updates of the steps before are made; the next ``train()`` is a block of its own."""
    plain = trainer(network(), tmp_path / "plain", Break(error))
    offload = OffloadCallback(**quarter())
    paged = trainer(network(), tmp_path / "paged", offload, Break(error))
    for client in (plain, paged):
        torch.manual_seed(0)
        with pytest.raises(type(error)) as caught:
            client.train()
        assert caught.value is error
    assert_same_outcome(paged, plain)
    failed = offload.session
    for client in (plain, paged):
        torch.manual_seed(0)
        client.train()
    assert offload.session is not failed
    assert_paged(offload.session, steps=4)
    assert_same_outcome(paged, plain)


def test_a_smaller_batch_is_tried_in_a_new_block(tmp_path: Path) -> None:
    """With ``auto_find_batch_size`` the Trainer begins anew without ending what it began."""

    class Data(list):  # type: ignore[type-arg]
        def __getitems__(self, indices: list[int]) -> list[Any]:
            if len(indices) > 2 and self.late:
                self.late = False
                raise RuntimeError("CUDA out of memory.")
            self.late = True
            return [self[index] for index in indices]

        late = False

    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
    plain, paged = trained(tmp_path, data=Data(samples()), **options)
    assert_same_outcome(paged, plain)


# Refusals


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    client = trainer(
        network(), tmp_path, OffloadCallback(**quarter()), OffloadCallback(**quarter())
    )
    with pytest.raises(ConfigError, match="this Trainer has 2 OffloadCallbacks: pass it one"):
        client.train()
    assert_ordinary(client.model)


def test_a_callback_that_comes_late_is_refused(tmp_path: Path) -> None:
    client = trainer(network(), tmp_path)
    client.add_callback(OffloadCallback(**quarter()))
    with pytest.raises(
        ConfigError, match=r"is too late to leave the block.*Trainer\(callbacks=\[OffloadCallback"
    ):
        client.train()
    assert_ordinary(client.model)


def test_a_model_on_several_devices_is_refused(tmp_path: Path) -> None:
    client = trainer(network(), tmp_path, OffloadCallback(**quarter()))
    client.args._n_gpu = 2  # as on a machine with two
    with pytest.raises(
        ConfigError,
        match=r"trains on 2 devices .* one process and one device; .*use_cpu=True",
    ):
        client.train()


def test_without_a_budget_both_remedies_are_named(tmp_path: Path) -> None:
    client = trainer(network(), tmp_path, OffloadCallback())
    with pytest.raises(
        ConfigError,
        match=r"no budget: pass OffloadCallback\(budget='8GiB'\), or .*dynoffload run --budget",
    ):
        client.train()
