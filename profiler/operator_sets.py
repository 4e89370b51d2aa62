"""The sets of operators that the idiom table answers for.

What it is: which overloads this torch has, which of them are its core set, and for which it has an
autograd formula, as torch itself says it: by its dispatcher, its tags, and the derivatives file in
its wheel. What it is not: what they do to memory (`dynoffload.profiler.idioms`).
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.resources import files

import torch

from dynoffload.profiler.idioms import base_name

Overload = torch._ops.OpOverload
_Packet = torch._ops.OpOverloadPacket


def registered(namespace: str = "aten") -> list[Overload]:
    """Return every overload that torch's dispatcher has in ``namespace``, by name.

    TorchScript's own builtins (``aten::len.str``) are not operators of the dispatcher. What Python
    code has added to ``aten`` after torch was built is left out; all of ``prims`` is such code, of
    which those are left out that torch's compiler adds for itself, once it is imported.
    """
    if namespace == "prims":
        importlib.import_module("torch._prims")  # registers them
    module = sys.modules.get("torch._inductor.inductor_prims")
    compiler = [] if module is None else list(vars(module).values())
    theirs = {one.name() for one in compiler if isinstance(one, Overload)}  # type: ignore[no-untyped-call]
    theirs |= {one._qualified_op_name for one in compiler if isinstance(one, _Packet)}
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space != namespace or full in theirs:
            continue
        base, _, overload = name.partition(".")
        func = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        if namespace == "prims" or not func._defined_in_python:
            found[full] = func
    return [found[name] for name in sorted(found)]


def core() -> list[Overload]:
    """Return the core ATen set: what torch lowers a graph to, by its own tag."""
    return [func for func in registered() if torch.Tag.core in func.tags]


def with_formula() -> list[Overload]:
    """Return the overloads for which torch has a formula for the gradient.

    A formula is written for one overload and holds for its in-place and ``out`` variants too.
    """
    text = (files("torchgen") / "packaged" / "autograd" / "derivatives.yaml").read_text("utf-8")
    names = re.findall(r"^- name: +([\w.]+)\(", text, re.MULTILINE)
    found = []
    for name in dict.fromkeys(names):
        base, _, overload = name.partition(".")
        found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return found


def family(overloads: list[Overload]) -> list[Overload]:
    """Return every registered overload of the operators of ``overloads``.

    That is: all that share a base name with one of them, whatever their types, and whether they
    work in place, into ``out``, or neither.
    """
    names = {base_name(func) for func in overloads}
    return [func for func in registered() if base_name(func) in names]
