"""The planner's blocks against module-wise ones: what a pilot's labels should be made of.

A sample's label is the list of blocks that its resolved run visits. The planner cuts a network into
blocks that fit an eighth of the budget and decide nothing (`dynoffload.planning.cutting`);
module-wise, each module with parameters is one. The same pilot learns online from either. Its
predictions are compared with what ran, module by module, so that both are measured alike.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from dynoffload.experiments.harness import Row
from dynoffload.experiments.pilot_recording import CASES, recorded
from dynoffload.experiments.ways import Spec
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.labels import Label, encode_example, label_traces
from dynoffload.pilot.pilot import Pilot
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import load_trace, trace_files

SHARE = 8
"""Footprint over budget."""
MODULES, PLANNED = "module-wise", "planner's"
_FIRST = 2 / 3  # share of the steps that are learned from before any is scored


def compare(key: str, steps: int, seed: int) -> Row:
    """Return the scores with both kinds of blocks on one network.

    Args:
        key: of `dynoffload.experiments.pilot_recording.CASES`.
        steps: recorded steps.
        seed: of weights and samples.
    """
    case = CASES[key]
    spec = Spec(case.network, case.preset, shape=case.shape, lr=case.lr, seed=seed, data_seed=seed)
    with recorded(spec, steps, lambda *_: None, before=case.before) as traces:
        labels = label_traces(traces, 1, lambda *_: None)
        late = trace_files(traces)[-8:]
        budget = max(footprint(load_trace(trace)) for trace in late) // SHARE
    return {
        MODULES: scored(labels, 1),  # nothing but single modules fits
        PLANNED: scored(labels, budget),
    }


def scored(labels: list[Label], budget: int) -> Row:
    """Return the scores of a pilot over blocks that are cut for a budget, in bytes."""
    vocabulary = build_vocabulary([label.calls for label in labels], budget)
    single = build_vocabulary([label.calls for label in labels], 1)
    nbytes = {block.path: block.nbytes for block in single.blocks}
    number = {path: place for place, path in enumerate(nbytes)}
    pilot = Pilot(vocabulary)
    right: list[float] = []
    missed = wasted = 0
    first = int(_FIRST * len(labels))
    for step, label in enumerate(labels):
        example = encode_example(vocabulary, label)
        named, ran = (
            [path for block in order if block >= 0 for path in vocabulary.blocks[block].visits]
            for order in (pilot.predict(example.sample).blocks, example.blocks)
        )
        if step >= first:
            pair = ([number[path] for path in named], [number[path] for path in ran])
            right.append(block_order_accuracy(*pair))
            missed += _weight(Counter(ran) - Counter(named), nbytes)
            wasted += _weight(Counter(named) - Counter(ran), nbytes)
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            pilot.consolidate()
    return {
        "blocks": len(vocabulary),
        "order": fmean(right),
        "missed_bytes": missed / len(right),
        "wasted_bytes": wasted / len(right),
    }


def _weight(paths: Counter[str], nbytes: dict[str, int]) -> int:
    return sum(count * nbytes[path] for path, count in paths.items())
