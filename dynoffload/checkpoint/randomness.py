"""State of the random number generators of torch, Python and numpy."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def states() -> dict[str, Any]:
    """Return the state of every global generator of the process."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    kind, module = _accelerator()
    if module is not None:
        found[kind] = module.get_rng_state_all()
    return found


def check(found: dict[str, Any]) -> None:
    """Check ``found`` by loading it into temporary generators.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: it is not what `states` returns.
    """
    torch.Generator().set_state(found["torch"])
    random.Random().setstate(found["python"])
    fresh = type(np.random.mtrand.get_bit_generator())()
    np.random.RandomState(fresh).set_state(found["numpy"])


def restore(found: dict[str, Any]) -> None:
    """Set the global generators to a state that `check` has accepted."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    kind, module = _accelerator()
    for name in found.keys() - {"torch", "python", "numpy"}:
        if name == kind and module is not None and module.device_count() == len(found[name]):
            module.set_rng_state_all(found[name])
        else:
            logger.warning(
                "the checkpoint has the random numbers of %d devices of kind %s, which are not "
                "here: they are not restored",
                len(found[name]),
                name,
            )


def _accelerator() -> tuple[str, Any]:
    """Return type and module of the accelerator if this process uses one, else ("", None)."""
    if not torch.accelerator.is_available():
        return "", None
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    used = getattr(module, "is_initialized", lambda: False)()
    return (device.type, module) if device is not None and used else ("", None)
