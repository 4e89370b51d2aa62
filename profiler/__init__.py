"""Records training steps: operators, memory-access idioms, regions and costs.

`Recorder` makes a `Trace` of each step of the user's loop; `profile` supplies a simple loop.
A `CostModel` predicts how long a trace takes on a machine.
"""

from __future__ import annotations

from dynoffload.profiler.costs import CostModel, Kind, Timing, Work
from dynoffload.profiler.idioms import Idioms, idioms_of, is_known, rule_of
from dynoffload.profiler.input_features import Features, InputFeatures, describe_input
from dynoffload.profiler.network import fingerprint, shape_key
from dynoffload.profiler.profiling import profile
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.routing import RoutingHint, RoutingProbe
from dynoffload.profiler.storage import load_trace, load_traces, save_trace, trace_files
from dynoffload.profiler.trace import ModuleCall, Operator, Phase, RegionInfo, Trace

__all__ = [
    "CostModel",
    "Features",
    "Idioms",
    "InputFeatures",
    "Kind",
    "ModuleCall",
    "Operator",
    "Phase",
    "Recorder",
    "RegionInfo",
    "RoutingHint",
    "RoutingProbe",
    "Timing",
    "Trace",
    "Work",
    "describe_input",
    "fingerprint",
    "idioms_of",
    "is_known",
    "load_trace",
    "load_traces",
    "profile",
    "rule_of",
    "save_trace",
    "shape_key",
    "trace_files",
]
