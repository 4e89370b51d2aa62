"""The page that shows the idiom table, docs/idioms.md, made from the table itself.

    python -m dynoffload.profiler.idiom_page > docs/idioms.md

What it is: text from `dynoffload.profiler.idioms` and the files it reads; the words on rules and on
counting are those of their docstrings. What it is not: a source of counts.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from dynoffload.profiler import idiom_rows, idioms
from dynoffload.profiler.idiom_published import (
    DIFFERENCES,
    PUBLISHED,
    STAND_IN_DIFFERENCES,
    STAND_INS,
    ours,
    stand_in,
)
from dynoffload.profiler.idioms import Idioms, base_name, idioms_of, is_known, rule_of
from dynoffload.profiler.operator_sets import Overload, core, family, registered, with_formula

_WIDTH = 100
_KINDS = ("row", "foreach", "pointwise", "synonym", "backward", "copy", "factory", "fill")
_SILENT = ("view", "metadata")

_HEAD = """\
# Idioms

Made by `python -m dynoffload.profiler.idiom_page > docs/idioms.md`, with torch {torch}. Change the
table (`profiler/idiom_rows.py`) or its rules (`profiler/idioms.py`), not this page.

An operator is described to the pilot by how often it shows each of six memory-access idioms. The
encoding, and the vectors of the operators named at the end, are from Ren et al., "Enabling Large
Dynamic Neural Network Training with Learning-based Memory Management", HPCA 2024. That the six
numbers of a printed vector stand in the order used here (transpose, gather, scatter, reduction,
stream, stencil) is our inference from the printed vectors.

| idiom | pattern |
|---|---|
| transpose | `A[i][j] = B[j][i]` |
| gather | `A[i] = B[C[i]]` |
| scatter | `A[C[i]] = B[i]` |
| reduction | `s += A[i]` |
| stream | `A[i] = f(A[i], B[i])` |
| stencil | `A[i] = f(A[i-1], A[i], A[i+1])` |
"""

_COVERED = """\
The core set is what torch tags as such; the operators with a formula are those of
`torchgen/packaged/autograd/derivatives.yaml` in torch's wheel. Variants are all overloads of an
operator of either set, in place and `out` too. Builtins of TorchScript that are no operators of the
dispatcher are left out, as are other namespaces (`quantized`, `c10d`, those of extensions): of an
operator of theirs only its own schema and tags are believed, and what these leave open is unknown,
which a trace records as such.
"""

_EXECUTED = """\
What training executes is measured apart, by `dynoffload experiment idioms`, which trains every
architecture of `experiments/architectures.py` under the recorder; its figures are in
`docs/results/idioms.json`.
"""

_OPERATORS = """\
Each name stands for its overloads, with its variants in place and into `out`, where they count
alike; otherwise the overload is named. Those of `prims` and `mkldnn` are listed where `aten` has
none that is called and counts the same.
"""


def page() -> str:
    """Return the page."""
    parts = (
        _HEAD.format(torch=torch.__version__.partition("+")[0]),
        "## How a row is counted\n\n" + _note(idiom_rows, "how a row is counted"),
        "## Rules\n\nThe first that applies decides.\n\n" + _note(idioms, "rules"),
        "## What is covered\n\n" + _covered() + "\n" + _COVERED + "\n" + _EXECUTED,
        "## Operators\n\n" + _OPERATORS + "\n" + _operators(),
        "## The published rows\n\n" + _published(),
    )
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _note(module: object, name: str) -> str:
    """Return the text of a note in a docstring, which ends it."""
    text = inspect.cleandoc(module.__doc__ or "").partition(f"[Note: {name}]\n")[2]
    return text.replace("``", "`") + "\n"


def _covered() -> str:
    sets = {
        "core ATen": core(),
        "with an autograd formula": with_formula(),
        "both, with all variants": family(core() + with_formula()),
        "all that torch registers in `aten`": registered(),
        "`prims`": registered("prims"),
        "`mkldnn`": registered("mkldnn"),
    }
    lines = [
        "| set | overloads | by row | by rule | nothing to count | unknown |",
        "|---|" + "--:|" * 5,
    ]
    for name, overloads in sets.items():
        kinds = Counter(_kind(func) for func in overloads)
        silent = sum(kinds[kind] for kind in _SILENT)
        unknown = sum(not is_known(func) for func in overloads)
        rest = len(overloads) - kinds["row"] - silent - unknown
        cells = (len(overloads), kinds["row"], rest, silent, unknown)
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _kind(func: Overload) -> str:
    return rule_of(func).partition(":")[0]


def _operators() -> str:
    """Return the operators by rule and, within it, by vector."""
    groups: dict[tuple[str, Idioms], set[str]] = defaultdict(set)
    for name, kind, counts in _named():
        groups[kind, counts].add(name)
    lines = []
    for kind in (*_KINDS, *_SILENT, "unknown"):
        found = sorted(
            (counts for k, counts in groups if k == kind), key=lambda c: (sum(c), c[::-1])
        )
        if found:
            lines += [f"### {kind}", ""]
        for counts in found:
            names = sorted(groups[kind, counts], key=lambda n: (n.strip("_"), n))
            text = f"**{_words(counts)}**: " + ", ".join(f"`{name}`" for name in names)
            lines += [
                textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False),
                "",
            ]
    return "\n".join(lines)


def _named() -> Iterator[tuple[str, str, Idioms]]:
    """Yield (name, rule, counts) with overloads merged where the others of the name agree."""
    known: dict[str, set[tuple[str, Idioms]]] = {}
    for namespace in ("aten", "prims", "mkldnn"):
        by_name: dict[str, list[Overload]] = defaultdict(list)
        for func in registered(namespace):
            by_name[base_name(func)].append(func)
        for name, overloads in by_name.items():
            kinds = {(_kind(func), idioms_of(func)) for func in overloads}
            if kinds <= known.get(name, set()):
                continue
            known.setdefault(name, kinds)
            prefix = "" if namespace == "aten" else f"{namespace}."
            if len(kinds) == 1:
                yield prefix + name, *next(iter(kinds))
                continue
            for func in overloads:
                full = str(func).removeprefix("aten.").removesuffix(".default")
                yield full, _kind(func), idioms_of(func)


def _words(counts: Idioms) -> str:
    """Return the vector and what it says, such as ``0 0 0 1 1 0, reduction stream``."""
    told = [
        field if count == 1 else f"{count} {field}"
        for field, count in zip(Idioms._fields, counts, strict=True)
        if count
    ]
    return f"{_vector(counts)} ({', '.join(told) or 'nothing'})"


def _vector(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))


def _published() -> str:
    agreeing = [name for name, row in PUBLISHED.items() if tuple(ours(name)) == row]
    share = len(agreeing) / len(PUBLISHED)
    gone = [f"`{name}`" for name in PUBLISHED if not hasattr(torch.ops.aten, name)]
    replaced = [name for name in PUBLISHED if name in STAND_INS]
    alike = [name for name in replaced if tuple(stand_in(name)) == PUBLISHED[name]]
    text = (
        f"Of the {len(PUBLISHED)} rows known to us, {len(agreeing)} ({share:.0%}) agree exactly."
        f" {len(replaced)} of the printed operators are not executed under that name by training on"
        " a CPU: torch makes them of others, or has no operator of the name any more"
        f" ({', '.join(gone)}; their rows stand for the printed ones alone). The last column says"
        " what is executed instead and what that counts, as a trace does; it equals the printed"
        f" row for {len(alike)} of the {len(replaced)}."
    )
    lines = [
        textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        "| operator | published | ours | agree | executed instead |",
        "|---|---|---|---|---|",
    ]
    for name, row in PUBLISHED.items():
        agree = "yes" if name in agreeing else "no"
        instead = ""
        if name in STAND_INS:
            operators = ", ".join(f"`{operator}`" for operator in STAND_INS[name])
            instead = f"{operators}: {_vector(stand_in(name))}"
        lines.append(f"| `{name}` | {_vector(row)} | {_vector(ours(name))} | {agree} | {instead} |")
    lines += ["", "Why our row differs:", "", *_reasons(DIFFERENCES)]
    lines += ["", "Why what is executed instead counts otherwise:", ""]
    lines += _reasons(STAND_IN_DIFFERENCES)
    return "\n".join(lines) + "\n"


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    return [
        textwrap.fill(f"- `{name}`: {why}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for name, why in reasons.items()
    ]


if __name__ == "__main__":
    sys.stdout.write(page())
