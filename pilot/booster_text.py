"""A guard before LightGBM's own parser, which trusts what it reads.

What it is: `check_booster_text`, which reads a model text the way LightGBM writes a small binary
booster and refuses anything else: children or features out of range, trees that are not trees,
categorical splits, sizes that would take memory. What it is not: a parser of models; LightGBM's is
used once the text is known to be harmless.
"""

from __future__ import annotations

import re

MAX_TEXT = 4 * 1024 * 1024
MAX_TREES = 256
MAX_LEAVES = 64
LARGEST = 1e30
"""The largest number of a tree; of a leaf, whose numbers are summed, `LARGEST_LEAF`."""
LARGEST_LEAF = 1e6

_HEADER = {
    "version",
    "num_class",
    "num_tree_per_iteration",
    "label_index",
    "max_feature_idx",
    "objective",
    "feature_names",
    "feature_infos",
    "tree_sizes",
}
_PER_SPLIT = (
    "split_feature",
    "split_gain",
    "threshold",
    "decision_type",
    "left_child",
    "right_child",
    "internal_value",
    "internal_weight",
    "internal_count",
)
_PER_LEAF = ("leaf_value", "leaf_weight", "leaf_count")
_TRAILER = "\nend of trees\n\npandas_categorical:null\n"
_INTEGER = re.compile(r"-?[0-9]{1,9}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,40})?(e[-+]?[0-9]{1,3})?")
_RANGE = re.compile(rf"none|\[{_NUMBER.pattern}:{_NUMBER.pattern}\]")
_PLAIN = re.compile(r"[\n -~]*")
_INTEGERS = {"split_feature", "decision_type", "left_child", "right_child"}
_SINGLE = {"num_leaves", "num_cat", "is_linear", "shrinkage"}


def check_booster_text(text: str, *, features: int) -> str:
    """Return a booster's text less its trailer, or refuse it.

    Args:
        text: as `lightgbm.Booster.model_to_string` gives it.
        features: how many columns the booster's input has.

    Returns:
        the header and the trees; what LightGBM writes after them (importances and training
        parameters) is not needed to predict and is replaced by an empty trailer.

    Raises:
        ValueError: if the text is not that of a small binary booster over so many columns.
    """
    if len(text) > MAX_TEXT or not _PLAIN.fullmatch(text):
        raise ValueError("a booster that is too large or not text")
    head, found, _ = text.partition("\nend of trees\n")
    if not found:
        raise ValueError("a booster that is cut short")
    header, *trees = head.split("\nTree=")
    fields = _fields(header.removeprefix("tree\n"))
    if not header.startswith("tree\n") or set(fields) - _HEADER or not {*_HEADER} <= set(fields):
        raise ValueError("a booster with an unknown header")
    kind = (fields["version"], fields["num_class"], fields["num_tree_per_iteration"])
    if kind != ("v4", "1", "1"):
        raise ValueError("a booster of another kind or version")
    if fields["objective"] != "binary sigmoid:1" or fields["label_index"] != "0":
        raise ValueError("a booster with another objective")
    if fields["max_feature_idx"] != str(features - 1):
        raise ValueError(f"a booster over other columns than the {features} there are")
    infos = fields["feature_infos"].split(" ")
    if fields["feature_names"] != " ".join(f"Column_{i}" for i in range(features)):
        raise ValueError("a booster with columns missing or renamed")
    if len(infos) != features or not all(_RANGE.fullmatch(info) for info in infos):
        raise ValueError("a booster with columns of another kind")
    if not 0 < len(trees) <= MAX_TREES:
        raise ValueError("a booster with no or too many trees")
    starts = [len(f"Tree={tree}\n") for tree in trees]
    if fields["tree_sizes"] != " ".join(map(str, starts)):
        raise ValueError("a booster whose trees are not as long as it says")
    for number, tree in enumerate(trees):
        index, _, body = tree.partition("\n")
        if index != str(number):
            raise ValueError("a booster whose trees are out of order")
        _check_tree(_fields(body), features)
    return head + _TRAILER


def _check_tree(fields: dict[str, str], features: int) -> None:
    """Refuse a tree that is not one."""
    if not _INTEGER.fullmatch(fields.get("num_leaves", "")):
        raise ValueError("a tree without its size")
    leaves = int(fields["num_leaves"])
    if not 1 <= leaves <= MAX_LEAVES or set(fields) - {*_SINGLE, *_PER_SPLIT, *_PER_LEAF}:
        raise ValueError("a tree of a strange size or with unknown parts")
    if fields.get("num_cat") != "0" or fields.get("is_linear") != "0":
        raise ValueError("a tree with categorical splits or linear leaves")
    # One space between numbers, and none elsewhere: LightGBM counts them so, and ends the process
    # where it counts differently.
    values = {
        name: fields[name].split(" ") if fields.get(name) else []
        for name in (*_PER_SPLIT, *_PER_LEAF)
    }
    for name, parts in values.items():
        form = _INTEGER if name in _INTEGERS else _NUMBER
        if not all(form.fullmatch(part) for part in parts):
            raise ValueError(f"a tree whose {name} are not numbers")
    for name in ("leaf_value", "threshold"):
        most = LARGEST_LEAF if name == "leaf_value" else LARGEST
        if not all(abs(float(part)) <= most for part in values[name]):
            raise ValueError(f"a tree whose {name} are too large")
    if leaves == 1 and len(values["leaf_value"]) == 1:
        # A constant: LightGBM writes its value and leaves the other parts empty.
        return
    if any(len(values[name]) != leaves - 1 for name in _PER_SPLIT):
        raise ValueError("a tree with splits missing")
    if any(len(values[name]) != leaves for name in _PER_LEAF):
        raise ValueError("a tree with leaves missing")
    if not all(0 <= int(feature) < features for feature in values["split_feature"]):
        raise ValueError("a split on a column that is not there")
    if not all(0 <= int(kind) < 12 and int(kind) & 1 == 0 for kind in values["decision_type"]):
        raise ValueError("a split of an unknown kind")
    children = [int(child) for child in (*values["left_child"], *values["right_child"])]
    expected = sorted([*range(1, leaves - 1), *(~leaf for leaf in range(leaves))])
    if sorted(children) != expected:
        raise ValueError("splits that do not form a tree")
    # LightGBM numbers a split after its parent, so the walk down always ends.
    pairs = zip(values["left_child"], values["right_child"], strict=True)
    for split, pair in enumerate(pairs):
        if any(0 <= int(child) <= split for child in pair):
            raise ValueError("splits that lead back")


def _fields(text: str) -> dict[str, str]:
    """Return the ``name=value`` lines of a part, each name once."""
    result: dict[str, str] = {}
    for line in text.split("\n"):
        if not line:
            continue
        name, equals, value = line.partition("=")
        if not equals or name in result:
            raise ValueError(f"a booster with the line {line[:40]!r}")
        result[name] = value
    return result
