"""The pilot: predicts which blocks a sample will run, and in which order.

`general` ranks the blocks of any network by what `evidence` says about them; `structure` (with
`template` and `loops`) is what the orders of a network share. `pilot` is the predictor and its
file, `tracking` updates a prediction within the step. `train` makes a pilot from the `labels` of
traces. Scores: `evaluate`.

Safetensors and rich are imported by the functions that use them.
"""

from __future__ import annotations

from dynoffload.pilot.pilot import Pilot, Prediction
from dynoffload.pilot.train import TrainResult, evaluate_pilot, train_pilot

__all__ = [
    "Pilot",
    "Prediction",
    "TrainResult",
    "evaluate_pilot",
    "train_pilot",
]
