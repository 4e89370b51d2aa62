"""The largest model or batch that trains in a given memory: plain PyTorch against every policy.

`capacity` grows a mixture of experts by layers, `max-batch` the batches of two trunks of
AlphaFold's kind by rows, until they no longer train. Each try runs in its own memory cgroup, whose
limit is ``memory`` above what a process takes without a network. A size fits if no step takes
longer than ``slowest`` times plain training's. The largest size is also reported for the paces of
`PACES`. Methods that count bytes get a share as their budget; the rest is for temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dynoffload.errors import ConfigError
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.contest import charged_before
from dynoffload.experiments.harness import Experiment, Row, option, table
from dynoffload.experiments.tries import WAYS, Params, Room, Subject, Try, attempt
from dynoffload.experiments.ways import Spec
from dynoffload.experiments.zoo import FOLDING, TRUNK
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PACES = (2.0, 4.0, 8.0)
"""Multiples of plain training's step time."""


class Largest(Experiment[Params]):
    """A case is a subject and a method; plain training's row sets the others' time limits."""

    parameters: ClassVar[type[Any]] = Params

    def subjects(self) -> Mapping[str, Subject]:
        """Return the subjects by name."""
        raise NotImplementedError

    def cases(self) -> Mapping[str, tuple[str, str]]:
        keys = dict.fromkeys(("plain", *self.params.ways))
        return {f"{name}, {key}": (name, key) for name in self.subjects() for key in keys}

    def run(self, case: tuple[str, str]) -> Row:
        name, key = case
        subject, way = self.subjects()[name], WAYS[key]
        plain = next((row for row in self.rows if row["case"] == f"{name}, plain"), None)
        base = charged_before(subject.spec(1)) if plain is None else plain["process_before_bytes"]
        room = _room(base, [] if plain is None else plain["tries"])

        def tried(size: int) -> Try:
            self.report(f"{subject.title}, {way.title}: {size}")
            return attempt(self.params, subject, way, size, room)

        tries = search(tried, self.params.most)
        best = max((each for each in tries if not each.why), key=lambda t: t.size, default=None)
        if plain is None:
            if best is None:
                raise ConfigError(
                    f"plain training does not fit {self.params.memory} at size 1: {tries[0].why}"
                )
            room = _room(base, list(map(asdict, tries)))
        told = [
            asdict(each) | {"pace": each.seconds / room.paced(each.size)}
            for each in sorted(tries, key=lambda each: each.size)
        ]
        return {
            "subject": name,
            "way": key,
            "largest": best.size if best else 0,
            "over_plain": best.size / room.holds if best else 0.0,
            "seconds": best.seconds if best else None,
            "seconds_over_plain": best.seconds / room.paced(best.size) if best else None,
            "within": within(told),
            "ended_by": _ended_by(tries, best.size if best else 0, self.params.most),
            "process_before_bytes": base,
            "tries": told,
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            name: {"losses_equal": same_losses([row for row in rows if row["subject"] == name])}
            for name in self.subjects()
        }

    def parts(self, result: Mapping[str, Any]) -> list[Table | str]:
        parts: list[Table | str] = []
        for name, subject in self.subjects().items():
            mine = _rows_of(result, name)
            columns = {
                head.replace("largest", f"largest ({subject.unit})"): cell
                for head, cell in _COLUMNS.items()
            }
            parts.append(table(subject.title, columns, mine, ["more fails by"]))
            equal = result["summary"][name]["losses_equal"]
            told = "equal, bit for bit" if equal else "NOT EQUAL: see the JSON"
            parts.append(f"losses of ways that made steps of one size, {name}: {told}")
        return parts

    def draw(self, figure: Figure, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        subjects = self.subjects()
        every = figure.subplots(len(subjects), 2, squeeze=False)
        for (left, right), (name, subject) in zip(every, subjects.items(), strict=True):
            rows = _rows_of(result, name)
            _bars(left, color, f"{subject.title} in {self.params.memory}", rows)
            _paces(right, color, subject.unit, rows)


class Capacity(Largest):
    """Layers of 3.4 million parameters each; plain training holds a handful of them."""

    height = 3.2
    sizes: ClassVar[Mapping[str, int]] = {"hidden": 256, "heads": 8, "experts": 8, "width": 512}

    def subjects(self) -> Mapping[str, Subject]:
        shape = {"rows": 1, "length": self.params.tokens}

        def spec(layers: int) -> Spec:
            return Spec("moe", "tiny", sizes={**self.sizes, "layers": layers}, shape=shape)

        return {"moe": Subject("layers of a mixture of experts", "layers", spec, meta=True)}


@dataclass(frozen=True)
class BatchParams(Params):
    """As `Params`, with a larger budget share and fewer tokens."""

    share: float = option(0.6, "of that, as the budget of ways that count bytes")
    tokens: int = option(16, "residues of a row")


class MaxBatch(Largest):
    """Rows of the Evoformer with recycling, and of ESMFold: nearly all memory is activations."""

    parameters = BatchParams
    height = 6.4

    def subjects(self) -> Mapping[str, Subject]:
        length = self.params.tokens
        fixed = {"min_length": length, "max_length": length, "min_depth": 8, "max_depth": 8}

        def of(network: str) -> Subject:
            def spec(rows: int) -> Spec:
                return Spec(network, "small", shape={"rows": rows, "max_cycles": 3, **fixed})

            return Subject(f"rows of {network}", "rows", spec)

        return {network: of(network) for network in (TRUNK, FOLDING)}


def _room(base: int, tries: Sequence[Mapping[str, Any]]) -> Room:
    return Room(base, {one["size"]: one["seconds"] for one in tries if not one["why"]})


def search(attempt: Callable[[int], Try], most: int) -> list[Try]:
    """Double the size until it does not fit, then bisect.

    While none fits, a size that is only too slow is doubled too: overhead per operator weighs most
    in the smallest steps.
    """
    tries: list[Try] = []

    def fits(size: int) -> bool:
        tries.append(attempt(size))
        return not tries[-1].why

    low, high = 0, 1
    while high <= most:
        if fits(high):
            low = high
        elif low or not tries[-1].seconds:
            break
        high *= 2
    high = min(high, most + 1)
    while low and high - low > max(1, low // 16):  # resolution of a sixteenth
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return tries


def _ended_by(tries: Sequence[Try], best: int, most: int) -> str:
    """Return why the smallest size above ``best``, the largest that fits, does not fit."""
    failed = [each for each in tries if each.why and each.size > best]
    nothing = Try(most, f"nothing: {most} is the largest that was tried")
    return min(failed, key=lambda each: each.size, default=nothing).why


def within(tries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return pace -> the largest size that fits and keeps the pace; 0 if none."""
    fits = [each for each in tries if not each["why"]]
    return {
        f"{most:g}": max((each["size"] for each in fits if each["pace"] <= most), default=0)
        for most in PACES
    }


def same_losses(rows: Sequence[Row]) -> bool:
    """Return whether all methods have equal losses wherever they ran the same size."""
    known: dict[int, Sequence[str]] = {}
    return all(
        one == other
        for row in rows
        for each in row["tries"]
        if each["losses"]
        for one, other in zip(
            known.setdefault(each["size"], each["losses"]), each["losses"], strict=False
        )
    )


def _rows_of(result: Mapping[str, Any], subject: str) -> list[Row]:
    """Return a subject's rows; older results have ways that there are no more."""
    return [row for row in result["rows"] if row["subject"] == subject and row["way"] in WAYS]


def _pace(most: float) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row["within"][f"{most:g}"])


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "way": lambda row: WAYS[row["way"]].title,
    "largest": lambda row: str(row["largest"]),
    "times plain": lambda row: f"{row['over_plain']:.2f}",
    "step": lambda row: "" if row["seconds"] is None else format_seconds(row["seconds"]),
    "pace": lambda row: "" if row["seconds"] is None else f"{row['seconds_over_plain']:.2f}",
    **{f"at most {most:g}x": _pace(most) for most in PACES},
    "more fails by": lambda row: row["ended_by"],
}


def _bars(axes: Axes, color: Mapping[str, str], title: str, rows: Sequence[Row]) -> None:
    rows = rows[::-1]
    values = [row["over_plain"] for row in rows]
    names = [WAYS[row["way"]].title for row in rows]
    bars = axes.barh(names, values, color=[color[WAYS[row["way"]].look[0]] for row in rows])
    labels = [f"{row['over_plain']:.1f}x ({row['largest']})" for row in rows]
    axes.bar_label(bars, labels=labels, padding=4)
    axes.set_title(title, loc="left")
    axes.set(xlim=(0, 1.4 * max(values)), xlabel="largest, times that of plain training")


def _paces(axes: Axes, color: Mapping[str, str], unit: str, rows: Sequence[Row]) -> None:
    for row in rows:
        way = WAYS[row["way"]]
        shade, mark = way.look
        made = [one for one in row["tries"] if one["seconds"]]
        x, y = ([one[key] for one in made] for key in ("size", "pace"))
        look: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.2, "color": color[shade]}
        axes.plot(x, y, marker=mark, label=way.title, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=unit, ylabel="step, times plain training's pace")
    axes.legend(frameon=False, fontsize=7)
