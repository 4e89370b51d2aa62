"""transformers' Trainer with `OffloadCallback`: whatever the Trainer does, to the same bits.

Each test lets a Trainer train one model plainly and a copy under a quarter of its footprint.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import assert_paged, each_backend, network, quarter, samples, without_times
from exactness import assert_ordinary, assert_same, assert_same_training
from safetensors.torch import load_file
from torch import nn

import dynoffload
from dynoffload.errors import BackendError, ConfigError
from dynoffload.memory.pager import in_user_mode, probe

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dynoffload.integrations.transformers import OffloadCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trainer(model: nn.Module | None, out: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Return a Trainer of four steps that logs each."""
    given: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    extras = {k: options.pop(k) for k in ("optimizers", "model_init", "data") if k in options}
    data = extras.pop("data", samples())
    return Trainer(
        model,
        TrainingArguments(output_dir=str(out), **{**given, **options}),
        train_dataset=data,
        eval_dataset=samples()[:4],
        callbacks=list(callbacks),
        **extras,
    )


def optimizer_of(client: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    inner: torch.optim.Optimizer = client.optimizer.optimizer
    return inner


def assert_same_outcome(actual: Trainer, expected: Trainer) -> None:
    """Assert that two Trainers logged the same and left the same."""
    assert_ordinary(actual.model, optimizer_of(actual))
    logged = [[without_times(row) for row in t.state.log_history] for t in (actual, expected)]
    assert_same(*logged, "log")
    assert_same_training(actual.model, optimizer_of(actual), expected.model, optimizer_of(expected))


EVERYTHING: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.05,
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
"""Accumulation, clipping, a schedule, autocast, evaluation and checkpoints in mid-training."""


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

    def tied() -> LlamaForCausalLM:
        model = llama(hidden_size=512, tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    found = []
    for name, callbacks in (
        ("plain", []),
        ("paged", [OffloadCallback(**quarter("pager", make=tied))]),
    ):
        client = trainer(tied(), tmp_path / name, *callbacks, **{**EVERYTHING, "max_steps": 2})
        client.train()
        at = tmp_path / name / "checkpoint-2"
        state = torch.load(at / "optimizer.pt", weights_only=True)
        found.append((load_file(at / "model.safetensors"), state))
    assert_same(found[1], found[0], "checkpoint")


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
    found = []
    for name, callbacks in (("plain", []), ("paged", [OffloadCallback(**quarter())])):
        client = trainer(
            network(), tmp_path / name, *callbacks, EarlyStoppingCallback(1), **options
        )
        client.train()
        found.append(client)
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
                raise RuntimeError("CUDA out of memory.")
            self.late = True
            return [self[index] for index in indices]

        late = False

    found = []
    for name, callbacks in (("plain", []), ("paged", [OffloadCallback(**quarter())])):
        options = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
        client = trainer(network(), tmp_path / name, *callbacks, data=Data(samples()), **options)
        client.train()
        found.append(client)
    assert_same_outcome(found[1], found[0])


# Models larger than memory


def llama(**options: Any) -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


def give(module: nn.Module) -> None:
    """Initialise a module of the Llama; what it draws depends on its sizes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(p.numel() for p in module.parameters(recurse=False)))
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.02)
        if hasattr(module, "inv_freq"):
            frequencies, _ = type(module).compute_default_rope_parameters(module.config)
            module.inv_freq.copy_(frequencies)
            module.original_inv_freq.copy_(frequencies)


@torch.no_grad()
def given() -> LlamaForCausalLM:
    """Return a Llama in memory."""
    model = llama()
    for module in model.modules():
        give(module)
    return model


def on_meta() -> LlamaForCausalLM:
    """Return the same Llama on the meta device, its weights still to be given."""
    with torch.device("meta"):
        model = llama()
    return dynoffload.materialize(model, give)


@pytest.mark.parametrize("by", ["model", "model_init"])
def test_a_model_on_the_meta_device_is_given_its_weights_in_the_block(
    by: str, tmp_path: Path
) -> None:
    """`materialize` before the Trainer, or in what makes the model for it."""
    plain = trainer(given(), tmp_path / "plain", **EVERYTHING)
    plain.train()
    offload = OffloadCallback(**quarter(make=llama))
    if by == "model":
        paged = trainer(on_meta(), tmp_path / "paged", offload, **EVERYTHING)
    else:
        paged = trainer(None, tmp_path / "paged", offload, model_init=on_meta, **EVERYTHING)
    assert paged.model.device.type == "meta"
    paged.train()
    assert_paged(offload.session)
    assert_same_outcome(paged, plain)


def test_a_model_on_the_meta_device_resumes_inside_a_block(tmp_path: Path) -> None:
    """The callback refuses, as the Trainer loads before it; its remedy works."""
    reference = given()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    plain = trainer(reference, tmp_path / "plain", optimizers=(optimizer, None), **EVERYTHING)
    plain.train()
    checkpoint = str(tmp_path / "plain" / "checkpoint-2")
    offload = OffloadCallback(**quarter(make=llama))
    model = on_meta()
    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-3), None)
    refused = trainer(model, tmp_path, offload, optimizers=optimizers, **EVERYTHING)
    with pytest.raises(ConfigError, match=r"weights were not loaded.* around Trainer\("):
        refused.train(resume_from_checkpoint=checkpoint)

    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, **quarter(make=llama)):
        paged = trainer(model, tmp_path / "paged", optimizers=(optimizer, None), **EVERYTHING)
        paged.train(resume_from_checkpoint=checkpoint)
    for client in (paged, plain):
        del client.state.log_history[-1]["train_loss"]  # of the steps since it was resumed
    assert_same_outcome(paged, plain)


def test_a_noted_model_stays_where_it_is() -> None:
    """Its ``to`` takes the dtype, and notes the device, where the block then trains it; copies have
    one of their own."""
    model = on_meta()
    assert model.to("cpu") is model
    assert model.to(torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    twin = copy.deepcopy(model)
    assert twin.to("cpu") is twin
    optimizer = torch.optim.AdamW(model.parameters())
    assert model.to("xpu:3") is model
    assert twin.to("cuda:1") is twin
    with (
        pytest.raises(BackendError, match="parameters are to be on 'xpu:3'"),
        dynoffload.offload(model, optimizer, budget="1GiB"),
    ):
        pass


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
