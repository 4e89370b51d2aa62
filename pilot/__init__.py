"""The pilot: predicts which blocks a sample will run, and in which order.

Model inputs: `features`, `codes`. Structure shared by all orders: `template`, `loops`. Choices per
sample: `boosting` (with `association` and `trees`), corrected within the step by `correction` and
`tracking`. `pilot` is the predictor and its file. Training: `labels` of traces, `fit`, `train`;
within a run, `online`. Scores: `evaluate`.

LightGBM, safetensors and rich are imported by the functions that use them.
"""

from __future__ import annotations

from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot, Prediction
from dynoffload.pilot.train import TrainResult, evaluate_pilot, train_pilot

__all__ = [
    "OnlineLearner",
    "Pilot",
    "Prediction",
    "TrainResult",
    "evaluate_pilot",
    "train_pilot",
]
