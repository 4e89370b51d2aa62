"""Whether the idiom table knows every operator that training executes.

Each of `ARCHITECTURES`, tiny and with random weights, is trained for a few steps under the
profiler's recorder (forward, backward and optimizer). Reports the operators in the traces, and the
rule that covers each of them. The table itself is docs/idioms.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.experiments.architectures import ARCHITECTURES, Architecture
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import Experiment, Row, check_known, option, table
from dynoffload.profiler import Recorder, Trace, rule_of

_SEED = 0


@dataclass(frozen=True)
class Params:
    """Options of the experiment."""

    architectures: tuple[str, ...] = option((), "names; all by default")
    steps: int = option(2, "optimizer steps of each, on samples of their own")

    def __post_init__(self) -> None:
        check_known("architectures", self.architectures, ARCHITECTURES)


class Idioms(Experiment[Params]):
    """A case is an architecture."""

    parameters = Params

    def cases(self) -> Mapping[str, str]:
        return {name: name for name in self.params.architectures or ARCHITECTURES}

    def run(self, case: str) -> Row:
        traces = trained(ARCHITECTURES[case], self.params.steps)
        executed = [operator.name for trace in traces for operator in trace.operators]
        return {
            "architecture": case,
            "steps": len(traces),
            "executed": len(executed),
            "operators": sorted(set(executed)),
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        seen = sorted({operator for row in rows for operator in row["operators"]})
        rules = {operator: rule_of(_overload(operator)) for operator in seen}
        return {
            "torch": torch.__version__.partition("+")[0],
            "executed": sum(row["executed"] for row in rows),
            "unknown": {
                operator: [row["architecture"] for row in rows if operator in row["operators"]]
                for operator, rule in rules.items()
                if rule == "unknown"
            },
            "rules": dict(Counter(rule.partition(":")[0] for rule in rules.values()).most_common()),
            "operator_rules": rules,
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        found = result["summary"]
        rules = [{"rule": rule, "count": str(count)} for rule, count in found["rules"].items()]
        columns = {"rule": lambda row: row["rule"], "operators": lambda row: row["count"]}
        return [
            table(f"{len(result['rows'])} architectures", columns, rules),
            f"of {len(found['operator_rules'])} operators, {len(found['unknown'])} unknown",
            *(
                f"unknown: {operator}, executed by {', '.join(where)}"
                for operator, where in found["unknown"].items()
            ),
        ]


def trained(architecture: Architecture, steps: int) -> list[Trace]:
    """Return the traces of ``steps`` training steps."""
    torch.manual_seed(_SEED)
    model = architecture.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        for step in range(steps):
            loss = architecture.loss(model(**architecture.sample(model, step)))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return traces


def _overload(name: str) -> Any:
    """Return the overload with a trace's name, such as ``"aten.mm.default"``."""
    namespace, base, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)
