"""Callback for Lightning's `Trainer` that trains under a budget.

    from dynoffload.integrations.lightning import OffloadCallback

    trainer = lightning.Trainer(accelerator="cpu", callbacks=[OffloadCallback(budget="8GiB")])
    trainer.fit(module, loader)

The block is entered after the optimizer is created, before a checkpoint's state is loaded into it.
It is left when ``fit()`` ends or fails.

[Note: the sample]  Lightning calls ``module.training_step(batch)``, not ``module(batch)``. But the
call of the managed root marks a sample, and makes activations pageable. So, inside the block,
``training_step`` runs through the module's own call, as in Lightning itself if a strategy wraps the
module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.integrations.block import EventBlock
from dynoffload.integrations.imports import importing
from dynoffload.runtime.initialising import tensors_on_meta
from dynoffload.runtime.meta_init import recipe_is_noted
from dynoffload.runtime.offload import materialize

with importing("lightning", extra="lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback


class OffloadCallback(EventBlock, Callback):  # type: ignore[misc]
    """Trains a LightningModule within ``budget`` bytes of fast memory, to the same bits.

    Args:
        budget, pilot, spill_dir, host_budget, config: as `dynoffload.offload` takes them; the
            device is the Trainer's.

    Unless logging is configured, a line on stderr reports what is paged when training begins, and
    another the cost when it ends; otherwise they are log lines of ``dynoffload``. `session` has the
    numbers: ``callback.session.stats`` is a table of all steps, and
    ``callback.session.report("run.html")`` writes the page.
    """

    call = "OffloadCallback(budget='8GiB')"
    _module: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject unsupported setups; register a module on the meta device for initialization.

        Raises:
            ConfigError: the Trainer has two of these callbacks, or several devices.
        """
        if stage != "fit":
            return
        ours = [c for c in trainer.callbacks if isinstance(c, OffloadCallback)]
        if len(ours) > 1:
            raise ConfigError(f"this Trainer has {len(ours)} OffloadCallbacks: pass it one")
        if trainer.world_size > 1:
            raise ConfigError(
                f"the {type(pl_module).__name__} trains on {trainer.world_size} devices of type "
                f"{trainer.strategy.root_device.type}: offload() serves one process and one "
                "device; pass Trainer(devices=1)"
            )
        if tensors_on_meta(pl_module) and not recipe_is_noted(pl_module):
            materialize(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the block.

        Raises:
            ConfigError: there is not exactly one optimizer, or a checkpoint was to be loaded into a
                module on the meta device; or as `dynoffload.offload` raises.
        """
        if trainer.ckpt_path is not None and tensors_on_meta(pl_module):
            raise ConfigError(
                f"the weights of {trainer.ckpt_path} were not loaded, as the "
                f"{type(pl_module).__name__} is on the meta device: build it in memory"
            )
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers() of {type(pl_module).__name__} returned "
                f"{len(trainer.optimizers)} optimizers, and offload() takes one: give it one with "
                "a parameter group for each part"
            )
        self.enter(pl_module, trainer.optimizers[0], trainer.strategy.root_device)
        self._module = pl_module
        pl_module.__dict__["training_step"] = functools.partial(
            _call_as_forward, pl_module, pl_module.training_step
        )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the block after training failed or was interrupted."""
        self._leave(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the block at the end of training."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        module, self._module = self._module, None
        if module is not None:
            module.__dict__.pop("training_step", None)
        self.leave(error)


def _call_as_forward(module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``step``, a method of ``module``, as its forward; see [Note: the sample]."""
    own = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()  # the step itself may call the module
        return step(*args, **kwargs)

    module.__dict__["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        restore()
