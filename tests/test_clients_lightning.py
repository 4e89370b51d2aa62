"""Lightning's Trainer with `OffloadCallback`: whatever it does, to the same bits.

Each test lets a Trainer fit one module plainly and a copy under a quarter of its footprint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clients import Recurrent, assert_paged, each_backend, network, quarter, samples
from exactness import assert_ordinary, assert_same, assert_same_training
from torch import Tensor, nn

import dynoffload
from dynoffload.errors import ConfigError

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402

from dynoffload.integrations.lightning import OffloadCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Trains a network in part by its own call, and logs what it sees."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or network()
        self.seen: list[Tensor] = []

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(ids, labels)["loss"]
        return loss

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self(batch["input_ids"], batch["labels"])
        self.seen.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        """Log the loss of a batch."""
        loss = self(batch["input_ids"], batch["labels"])
        self.seen.append(loss.clone())
        self.log("validation", loss)

    def configure_optimizers(self) -> Any:
        """Return an optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(rows: int = 2) -> Any:
    """Return batches in a fixed order."""
    return torch.utils.data.DataLoader(samples(), batch_size=rows)  # type: ignore[arg-type]


def fit(module: Any, out: Path, *callbacks: Any, resume: str | None = None, **options: Any) -> Any:
    """Fit ``module`` for six steps and return its Trainer."""
    given: dict[str, Any] = {
        "max_steps": 6,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        default_root_dir=out, callbacks=list(callbacks), **{**given, **options}
    )
    trainer.fit(module, loader(), loader(4), ckpt_path=resume)
    return trainer


def assert_same_outcome(paged: Any, module: Any, plain: Any, expected: Any) -> None:
    """Assert that two Trainers and their modules saw the same and left the same."""
    assert "training_step" not in module.__dict__
    assert_ordinary(module, paged.optimizers[0])
    assert_same(module.seen, expected.seen, "losses")
    assert_same_training(module, paged.optimizers[0], expected, plain.optimizers[0])


EVERYTHING: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.05,
    "precision": "bf16-mixed",
    "val_check_interval": 4,
    "limit_val_batches": 2,
    "enable_checkpointing": True,
}


@each_backend
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["bare", "everything"])
def test_a_trainer_fits_to_the_same_bits(
    backend: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses of training and validation, weights, optimizer state, and what was saved."""
    expected, module = Module(), Module()
    saver = [ModelCheckpoint(tmp_path / n, every_n_train_steps=3, save_last=True) for n in "ab"]
    callbacks = [[s] for s in saver] if options else [[], []]
    plain = fit(expected, tmp_path, *callbacks[0], **options)
    offload = OffloadCallback(**quarter(backend))
    paged = fit(module, tmp_path, offload, *callbacks[1], **options)
    assert_paged(offload.session, steps=6)
    assert_same_outcome(paged, module, plain, expected)
    if options:
        names = sorted(path.name for path in (tmp_path / "a").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
        for name in names:
            saved = [torch.load(tmp_path / d / name, weights_only=False) for d in "ba"]
            for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
                assert_same(saved[0][key], saved[1][key], f"{name}[{key!r}]")


def test_activations_are_paged(tmp_path: Path) -> None:
    """The step that Lightning calls is a sample, though the module's own call is not made."""

    class Direct(Module):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            """Call a part of the module only."""
            loss: Tensor = self.net(batch["input_ids"], batch["labels"])["loss"]
            self.seen.append(loss.detach().clone())
            return loss

    expected, module = Direct(), Direct()
    plain = fit(expected, tmp_path, limit_val_batches=0)
    offload = OffloadCallback(**quarter())
    chunks: list[bool] = []

    class Look(Callback):  # type: ignore[misc]
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            assert offload.session is not None
            assert offload.session._paging is not None
            chunks.append(offload.session._paging.activations.are_held())

    paged = fit(module, tmp_path, offload, Look(), limit_val_batches=0)
    assert all(chunks)
    assert len(chunks) == 6
    assert_same_outcome(paged, module, plain, expected)


@pytest.mark.parametrize("offloaded", [(True, False), (False, True)])
def test_a_run_is_resumed_from_a_checkpoint(offloaded: tuple[bool, bool], tmp_path: Path) -> None:
    """Saved under a budget and resumed without, and the other way round."""

    class Undropped(Module):
        """Lightning does not save the random numbers' state: no dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.net.dropout = nn.Identity()

    def train(name: str, *paged: bool) -> tuple[Any, Any]:
        resume = None
        seen: list[Tensor] = []
        for steps, offload in zip((3, 6), paged, strict=True):
            module = Undropped()
            callbacks = [OffloadCallback(**quarter())] if offload else []
            options = {"max_steps": steps, "limit_val_batches": 0, "precision": "bf16-mixed"}
            trainer = fit(module, tmp_path, *callbacks, resume=resume, **options)
            resume = str(tmp_path / name)
            trainer.save_checkpoint(resume)
            seen += module.seen
        module.seen = seen
        return trainer, module

    reference, whole = train("plain", False, False)
    assert_same_outcome(*train("paged", *offloaded), reference, whole)
    assert len(whole.seen) == 6


class Break(Callback):  # type: ignore[misc]
    """Raises ``error`` after the second batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if args[4] == 1:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_loop_that_fails_leaves_ordinary_tensors(error: BaseException, tmp_path: Path) -> None:
    """The updates of the steps before are made. Lightning makes an exit of an interrupt."""
    import signal

    handler = signal.getsignal(signal.SIGINT)
    trainers = []
    modules = [Module(), Module()]
    try:
        for module, callbacks in zip(modules, [[], [OffloadCallback(**quarter())]], strict=True):
            with pytest.raises(ValueError if isinstance(error, ValueError) else SystemExit):
                fit(module, tmp_path, *callbacks, Break(error))
            trainers.append(module.trainer)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further interrupts
    assert_same_outcome(trainers[1], modules[1], trainers[0], modules[0])


def test_a_module_on_the_meta_device_is_given_its_weights_in_the_block(tmp_path: Path) -> None:
    """By each part's ``reset_parameters``, or by what `materialize` noted; with a sanity check."""

    @torch.no_grad()
    def give(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))

    expected = Module(Recurrent())
    for part in expected.modules():
        give(part)
    plain = fit(expected, tmp_path, **EVERYTHING)
    with torch.device("meta"):
        module = Module(Recurrent())
    offload = OffloadCallback(**quarter())
    paged = fit(dynoffload.materialize(module, give), tmp_path, offload, **EVERYTHING)
    assert_paged(offload.session)
    assert_same_outcome(paged, module, plain, expected)

    with torch.device("meta"):
        fresh = Module(Recurrent())
    trainer = fit(fresh, tmp_path, OffloadCallback(**quarter()), max_steps=1)
    assert not any(p.is_meta for p in fresh.parameters())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with torch.device("meta"):
        fresh = Module(Recurrent())
    with pytest.raises(ConfigError, match=r"one\.ckpt were not loaded, as .*: build it in memory"):
        fit(fresh, tmp_path, OffloadCallback(**quarter()), resume=str(tmp_path / "one.ckpt"))


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this Trainer has 2 OffloadCallbacks: pass it one"):
        fit(Module(), tmp_path, OffloadCallback(**quarter()), OffloadCallback(**quarter()))


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            """Return two optimizers."""
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(
        ConfigError, match=r"of Two returned 2 optimizers, and offload\(\) takes one: give it one"
    ):
        fit(Two(), tmp_path, OffloadCallback(**quarter()))
