"""Callback for transformers' `Trainer` under a budget; weights for models on the meta device.

    from dynoffload.integrations.transformers import OffloadCallback

    trainer = Trainer(model, args, ..., callbacks=[OffloadCallback(budget="8GiB")])
    trainer.train()

The block is entered when training begins, with the Trainer's model and optimizer, and left when
``train()`` returns or raises. In between the Trainer accumulates, clips, schedules, evaluates and
saves as usual.

[Note: leaving]  A Trainer notifies its callbacks when training ends, but not when it fails. So,
when a Trainer is created, the callback wraps that Trainer's ``train`` method, to leave the block in
any case. Callbacks get the model but not the Trainer, so it is found as ``self`` in the calling
frames. A callback added later would miss this event. Methods that save are wrapped in the same way
(see `saving`), and the one that evaluates, to refuse a model that has no values yet.

[Note: meta]  The Trainer moves the model to its device before it calls any callback, which torch
refuses for a model on the meta device. After ``materialize(model)`` it skips the move, and the
block allocates the weights. So on an accelerator a model larger than its memory has to be built on
the meta device; one built in memory has to fit there once.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
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


def materialize(
    model: PreTrainedModel,
    path: str | Path | None = None,
    *,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
) -> PreTrainedModel:
    """Give weights to a transformers model that was built on the meta device.

    Works as `dynoffload.materialize`, inside a block or before it, with transformers' own
    initialization of modules. See `PlainWeights` for the resulting bits.

    Args:
        model: built under ``torch.device("meta")``; or a model of PEFT around one, with adapters of
            LoRA or IA3, which begin as PEFT lets them, or as they were saved. Tensors already in
            memory keep their values, unless a file is given.
        path: a directory that ``save_pretrained`` wrote, or a safetensors file or an index with the
            same names; None for random weights, distributed as by the model's constructor (other
            bits: see `PlainWeights`). The parameters are those of ``from_pretrained``.

        adapters: directories that PEFT's ``save_pretrained`` wrote, by the adapters' names.

    Returns:
        ``model``.

    Raises:
        ConfigError: the model is not of transformers, the files have a tensor too few, too many or
            of another shape, or transformers leaves a tensor without a value.
    """
    peft: Any = sys.modules.get("peft")
    adapted = peft is not None and isinstance(model, peft.PeftModel)
    inner: Any = model.get_base_model() if adapted else model
    around = peft is not None and isinstance(inner, peft.PeftModel | peft.PeftMixedModel)
    if around or getattr(inner, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"the adapters of this {type(inner).__name__} were not added by one call of "
            "peft.get_peft_model: call it once, with the model that the files are for, and "
            "add_adapter() of what it returns for further ones"
        )
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            f"the {type(model).__name__} is no PreTrainedModel of transformers: pass it to "
            "dynoffload.materialize, with init= a function that initialises a module"
        )
    if not isinstance(path, str | Path | None):
        raise ConfigError(
            f"path={path!r:.80} is no path: pass that of a directory or safetensors file, or None "
            "for random weights"
        )
    if not isinstance(adapters, Mapping):
        raise ConfigError(
            f"adapters={adapters!r:.80} is no mapping: pass the directories of saved adapters by "
            "their names, as adapters={'default': directory}"
        )
    if adapters and not adapted:
        raise ConfigError(
            f"adapters= was given, and the {type(model).__name__} has none: call "
            "peft.PeftModel.from_pretrained(model, directory) first"
        )
    give = _adapter_weights(model, adapters) if adapted else PlainWeights()
    offload.materialize(model, give if path is None else (path, give))
    return model


def _adapter_weights(model: Any, saved: Mapping[str, str | Path]) -> PlainWeights:
    from dynoffload.integrations.adapters import AdapterWeights

    return AdapterWeights(model, saved)


class OffloadCallback(EventBlock, TrainerCallback):  # type: ignore[misc]
    """Trains a Trainer's model within ``budget`` bytes of fast memory, to the same bits.

    Args:
        budget, pilot, spill_dir, host_budget, config: as `dynoffload.offload` takes them; the
            device is the Trainer's.

    Unless logging is configured, a line on stderr reports what is paged when training begins, and
    another the cost when it ends; otherwise they are log lines of ``dynoffload``. `session` has the
    numbers: ``callback.session.stats`` is a table of all steps, and
    ``callback.session.report("run.html")`` writes the page.
    """

    call = "OffloadCallback(budget='8GiB')"

    _resumes = False

    @functools.cached_property
    def _watched(self) -> weakref.WeakSet[Any]:  # wrapped Trainers; see [Note: leaving]
        return weakref.WeakSet()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the Trainer's ``train()`` so that the block is always left, its methods that save so
        that they can read the state, and its evaluation."""
        trainer = _trainer_that_calls()
        if trainer not in self._watched:
            self._watched.add(trainer)
            trainer.train = functools.wraps(trainer.train)(
                functools.partial(self._train, trainer.train)
            )
            for name in ("save_model", "_save_checkpoint"):
                save = getattr(trainer, name)
                setattr(trainer, name, functools.wraps(save)(functools.partial(self._save, save)))
            trainer.evaluation_loop = functools.wraps(trainer.evaluation_loop)(
                functools.partial(self._evaluate, trainer, trainer.evaluation_loop)
            )

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

    def _evaluate(
        self, trainer: Any, evaluate: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self.is_open and tensors_on_meta(trainer.model):
            raise ConfigError(
                f"the {type(trainer.model).__name__} is on the meta device until train() begins "
                "the block: pass TrainingArguments(eval_on_start=True), or evaluate inside 'with "
                "dynoffload.offload(model, budget=...)'"
            )
        return evaluate(*args, **kwargs)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, optimizer: Optimizer, **kwargs: Any
    ) -> None:
        """Enter the block; the Trainer has created and loaded everything needed.

        Raises:
            ConfigError: the Trainer has two of these callbacks, got this one too late, or uses
                several devices; or as `dynoffload.offload` raises.
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
    """Return the Trainer that is calling this callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ConfigError("OffloadCallback is called by a Trainer: pass it as Trainer(callbacks=[...])")
