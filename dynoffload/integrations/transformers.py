"""transformers' `Trainer` under a budget: a callback; and weights for models on the meta device.

    from dynoffload.integrations.transformers import OffloadCallback

    trainer = Trainer(model, args, ..., callbacks=[OffloadCallback(budget="8GiB")])
    trainer.train()

The block is entered when training begins, with the model and the optimizer that the Trainer made,
and left when ``train()`` returns or raises. In between the Trainer accumulates, clips, schedules,
evaluates and saves as ever.

[Note: leaving]  A Trainer tells its callbacks when training ends, and not when it fails. So, when
the Trainer is made, the callback puts a ``train`` around that Trainer's own one, which leaves the
block in any case. It finds the Trainer as the ``self`` of the frame that calls it, as callbacks are
told of the model but not of the Trainer. One that is added later would come too late for that. In
the same way it comes around what saves; see `saving`.

[Note: meta]  The Trainer moves the model to its device before any callback is called, which torch
refuses for a model on the meta device. After ``materialize(model)`` it does not, and the model gets
its weights where the block puts it. So on an accelerator a model that is larger than it has to come
from the meta device; one in memory has to fit there once.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.integrations.block import EventBlock
from dynoffload.integrations.constructing import PlainWeights
from dynoffload.integrations.imports import importing
from dynoffload.integrations.saving import readable_state
from dynoffload.runtime import offload
from dynoffload.runtime.initialising import tensors_on_meta

with importing("transformers", extra="transformers"):
    from transformers import PreTrainedModel, Trainer, TrainerCallback


def materialize(model: PreTrainedModel, path: str | Path | None = None) -> PreTrainedModel:
    """Give a model of transformers that was built on the meta device its weights.

    As `dynoffload.materialize`, inside a block or before it, with what transformers itself
    initialises its modules by: see `PlainWeights`, which also says which bits these are.

    Args:
        model: built under ``torch.device("meta")``. What it has in memory keeps its values, except
            by a file.
        path: a safetensors file with the model's own names; None for random weights, distributed as
            those are that the model would have had (other bits: see `PlainWeights`).

    Returns:
        ``model``.

    Raises:
        ConfigError: this is no model of transformers, the file lacks a tensor, or transformers
            leaves a tensor without a value.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the {type(model).__name__} is no PreTrainedModel of transformers: pass it to "
            "dynoffload.materialize, with init= a function that initialises a module"
        )
    if not isinstance(path, str | Path | None):
        raise ConfigError(
            f"path={path!r:.80} is no path: pass that of a safetensors file, or None for random "
            "weights"
        )
    give = PlainWeights()
    offload.materialize(model, give if path is None else (path, give))
    return model


class OffloadCallback(EventBlock, TrainerCallback):  # type: ignore[misc]
    """Trains a Trainer's model within ``budget`` bytes of fast memory, to the same bits.

    Args:
        budget, pilot, spill_dir, host_budget, config: as `dynoffload.offload` takes them; the
            device is the Trainer's.

    A line on the error stream says what is paged as training begins, and one what it took as it
    ends, unless logging is configured; then they are log lines of ``dynoffload``. `session` has the
    numbers: ``callback.session.stats`` is a table of all steps, and
    ``callback.session.report("run.html")`` writes the page.
    """

    call = "OffloadCallback(budget='8GiB')"

    _resumes = False

    @functools.cached_property
    def _watched(self) -> weakref.WeakSet[Any]:  # Trainers; see [Note: leaving]
        return weakref.WeakSet()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See to it that the block is left whenever the Trainer's ``train()`` ends, and that the
        Trainer can save."""
        trainer = _trainer_that_calls()
        if trainer not in self._watched:
            self._watched.add(trainer)
            trainer.train = functools.wraps(trainer.train)(
                functools.partial(self._train, trainer.train)
            )
            for name in ("save_model", "_save_checkpoint"):
                save = getattr(trainer, name)
                setattr(trainer, name, functools.wraps(save)(functools.partial(self._save, save)))

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._resumes = bool(resume_from_checkpoint)
        try:
            result = train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self.leave(error)
            raise
        self.leave()
        return result

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.session is None or not self.is_open:
            return save(*args, **kwargs)
        with readable_state(self.session):
            return save(*args, **kwargs)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, optimizer: Optimizer, **kwargs: Any
    ) -> None:
        """Enter the block; the Trainer has made and loaded all it needs.

        Raises:
            ConfigError: the Trainer has two of these callbacks, got this one too late, or spreads
                the model over processes; or as `dynoffload.offload` raises.
        """
        trainer = _trainer_that_calls()
        model = trainer.model
        ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, OffloadCallback)]
        if len(ours) > 1:
            raise ConfigError(
                f"this {type(trainer).__name__} has {len(ours)} OffloadCallbacks: pass it one"
            )
        if trainer not in self._watched:
            raise ConfigError(
                f"this OffloadCallback was added after the {type(trainer).__name__} was made, "
                "which is too late to leave the block if training fails: pass it as "
                f"{type(trainer).__name__}(callbacks=[OffloadCallback(...)])"
            )
        if args.world_size > 1 or args.n_gpu > 1:
            raise ConfigError(
                f"the {type(model).__name__} trains on {max(args.world_size, args.n_gpu)} devices "
                f"({args.parallel_mode}): offload() serves one process and one device; start one "
                "process that sees one (CUDA_VISIBLE_DEVICES=0), or pass "
                "TrainingArguments(use_cpu=True)"
            )
        if self._resumes and tensors_on_meta(model):
            raise ConfigError(
                f"the checkpoint's weights were not loaded, as the {type(model).__name__} is on "
                "the meta device: build it in memory, or leave the callback out and write 'with "
                "dynoffload.offload(model, optimizer, budget=...)' around Trainer(model, "
                "optimizers=(optimizer, None)), with dynoffload.materialize(model, ...) first"
            )
        self.enter(model, optimizer, args.device)


def _trainer_that_calls() -> Any:
    """Return the Trainer in whose event this is called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ConfigError("OffloadCallback is called by a Trainer: pass it as Trainer(callbacks=[...])")
