"""The pilot: which blocks a sample will run, and in which order.

What it is: `codes` and `features` (what models see), `skeleton` and `segments` (what is the same
for all samples, and what follows their elements), `association`, `boosting`, `mlp`,
`mlp_training`, `markov`, `paths`, `sequence` and `sequence_training` behind `models` (what each
sample decides), `correction` and `following` (the rest of a step, foretold as it runs), `pilot`
(the predictor), `artifact` and `booster_text` (its file), `fit`, `train` and `online` (how it comes
to be), `baselines`, `distance` and `evaluate` (how good it is). What it is not: a planner; what to
do with a prediction is said in `dynoffload.planning`.

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
