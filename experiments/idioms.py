"""Whether the idiom table knows every operator that training executes.

What it is: each of `ARCHITECTURES`, tiny and with random weights, trained for a few steps under the
profiler's recorder (forward, backward and optimizer); which operators its traces hold, and by which
rule each of them is known. What it is not: a measure of time. The table itself is docs/idioms.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments.architectures import ARCHITECTURES, Architecture
from dynoffload.pilot.progress import progress_bar
from dynoffload.profiler import Recorder, Trace, rule_of

_SEED = 0


def run(
    json_path: Path | None = None,
    *,
    architectures: Sequence[str] = (),
    steps: int = 2,
) -> dict[str, Any]:
    """Train and look each operator up.

    Args:
        json_path: not used; the numbers are written by the caller.
        architectures: names; all by default.
        steps: optimizer steps of each, on samples of their own.

    Returns:
        How many architectures and distinct operators there were, which operators were unknown and
        where, how many operators each rule decided, and a row for each architecture.

    Raises:
        ConfigError: if there is no architecture of a given name.
    """
    seen: dict[str, set[str]] = {}  # operator -> the architectures that execute it
    rows = []
    names = list(architectures) or list(ARCHITECTURES)
    if strange := [name for name in names if name not in ARCHITECTURES]:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"no architecture is named {strange[0]!r}; there are {known}")
    with progress_bar(True) as report:
        for done, name in enumerate(names):
            report(name, done, len(names))
            traces = trained(ARCHITECTURES[name], steps)
            executed = [operator.name for trace in traces for operator in trace.operators]
            for operator in executed:
                seen.setdefault(operator, set()).add(name)
            rows.append(
                {
                    "architecture": name,
                    "family": ARCHITECTURES[name].family,
                    "steps": len(traces),
                    "executed": len(executed),
                    "distinct": len(set(executed)),
                }
            )
    rules = {operator: rule_of(_overload(operator)) for operator in sorted(seen)}
    result: dict[str, Any] = {
        "torch": torch.__version__.partition("+")[0],
        "architectures": len(rows),
        "executed": sum(row["executed"] for row in rows),
        "operators": len(seen),
        "unknown": {op: sorted(seen[op]) for op, rule in rules.items() if rule == "unknown"},
        "rules": dict(Counter(rule.partition(":")[0] for rule in rules.values()).most_common()),
        "operator_rules": rules,
        "rows": rows,
    }
    _print(result)
    return result


def trained(architecture: Architecture, steps: int) -> list[Trace]:
    """Return the traces of a few steps."""
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
    """Return the overload that a trace calls ``name``, such as ``"aten.mm.default"``."""
    namespace, base, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['architectures']} architectures",
        caption=f"of {result['operators']} operators, {len(result['unknown'])} unknown",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("rule")
    table.add_column("operators", justify="right")
    for rule, count in result["rules"].items():
        table.add_row(rule, str(count))
    console = Console()
    console.print(table)
    for operator, where in result["unknown"].items():
        console.print(f"unknown: {operator}, executed by {', '.join(where)}")
