"""The general pilot: a small network that ranks the blocks of networks it has never seen.

It maps the features of a slot (`dynoffload.pilot.evidence.NAMES`) to the log-odds that the slot's
block runs: a linear map beside two rectified layers. The one that comes with the package was
trained offline, on steps whose control flow was resolved, by ``dynoffload experiment general``; its
card says on which networks. Numpy evaluates it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dynoffload.errors import PilotError
from dynoffload.pilot.evidence import NAMES
from dynoffload.pilot.features import Floats
from dynoffload.profiler.safefile import checked_weights, pack, read_file, write_whole

FORMAT = "dynoffload.general-pilot"
VERSION = 1
MAX_LAYERS = 4
"""The most layers, with which no weights that a file may hold overflow."""
CLIP = 3.0
"""Standardised features are clipped to this many standard deviations."""
_PACKAGED = Path(__file__).with_name("general.safetensors")


@dataclass(frozen=True)
class General:
    """Weights of the general pilot.

    Attributes:
        mean: of each feature in training.
        scale: the inverse of its standard deviation.
        layers: weights ``[out, in]`` and biases ``[out, 1]`` of each layer; the last has one row.
        direct: weights of the linear map, ``[1, NAMES]``.
        card: how it was trained, as plain JSON data.
    """

    mean: Floats
    scale: Floats
    layers: tuple[tuple[Floats, Floats], ...]
    direct: Floats
    card: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """Of the weights: names which general pilot this is."""
        arrays = (self.mean, self.scale, self.direct, *chain.from_iterable(self.layers))
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]

    def odds(self, features: Floats) -> Floats:
        """Return the log-odds that each slot runs, ``[slots]``, of features ``[NAMES, slots]``."""
        inputs = (features - self.mean[:, None]) * self.scale[:, None]
        np.clip(inputs, -CLIP, CLIP, out=inputs)
        np.nan_to_num(inputs, copy=False, nan=0.0)  # what is not known is as usual
        hidden = inputs
        for weights, bias in self.layers[:-1]:
            hidden = np.maximum(weights @ hidden + bias, 0)
        weights, bias = self.layers[-1]
        return np.asarray((weights @ hidden + bias + self.direct @ inputs)[0], np.float32)

    def save(self, path: Path) -> None:
        """Write the weights to one file."""
        arrays = {"mean": self.mean, "scale": self.scale, "direct": self.direct}
        for number, (weights, bias) in enumerate(self.layers):
            arrays |= {f"weights{number}": weights, f"bias{number}": bias}
        write_whole(path, pack({"names": list(NAMES), "card": self.card}, arrays, FORMAT, VERSION))

    @classmethod
    def load(cls, path: Path) -> General:
        """Read weights that `save` wrote.

        Raises:
            PilotError: the file is missing, or is no general pilot of this release.
        """
        try:
            document, arrays = read_file(path, FORMAT, VERSION)
            if document["names"] != list(NAMES):
                raise ValueError("it looks at other features")
            known = {name: checked_weights(name, array) for name, array in arrays.items()}
            count = sum(name.startswith("weights") for name in known)
            layers = tuple((known[f"weights{n}"], known[f"bias{n}"]) for n in range(count))
            widths = [len(NAMES), *(len(bias) for _, bias in layers)]
            shapes = [(weights.shape, bias.shape) for weights, bias in layers]
            if shapes != [((b, a), (b, 1)) for a, b in pairwise(widths)]:
                raise ValueError("layers of the wrong shape")
            if not 1 <= count <= MAX_LAYERS or widths[-1] != 1:
                raise ValueError(f"not one output of at most {MAX_LAYERS} layers")
            inputs = [known[name].shape for name in ("mean", "scale", "direct")]
            if inputs != [(len(NAMES),), (len(NAMES),), (1, len(NAMES))]:
                raise ValueError("inputs of the wrong shape")
            return cls(
                known["mean"], known["scale"], layers, known["direct"], dict(document["card"])
            )
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise PilotError(
                f"{path}: cannot be used as a general pilot: {error}. Install the package anew"
            ) from error


@cache
def packaged() -> General:
    """Return the general pilot that comes with the package."""
    return General.load(_PACKAGED)
