"""A recorded step as the runtime meets it: visits of units, what is saved, what backward asks for.

`Network` has the parameters and the modules that own them, and `recorded` makes a `Recorded` of the
trace of a plain step. Nothing here depends on a budget.

[Note: what is saved]  A trace does not tell what autograd saved; it tells which storages forward
made or read that backward reads again. Such a storage was saved in the module call whose backward
reads it, there by the operator that has most in common with the one that reads it; where several
have as much, by the first to read it, or, for what goes by its result, by the one that made it. It
ends with the storage itself, or with its last use in backward. What backward never reads, as where
only a shape is asked for, was saved by its first reader if it ends while backward runs.

[Note: parts]  Of a storage of which an operator saves less than half, such as a row of a table,
that part is saved by itself. It is seen where an operator reads nothing else but parameters: what
it read beyond those is the part.

[Note: nodes]  Before a node of the graph runs, all that it saved is asked for. Operators of one
module call that follow one another in backward count as one node where they read parameters, which
is so for modules that own some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dynoffload.errors import TraceError
from dynoffload.profiler.trace import Operator, Phase, Trace
from dynoffload.simulation.workload import spread
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

_OF_RESULTS = frozenset(
    "_softmax_backward_data _log_softmax_backward_data sigmoid_backward tanh_backward"
    " threshold_backward elu_backward native_dropout_backward".split()
)
"""Operators of backward that go by the result of forward's."""
_OWN = ("parameter", "buffer")


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: in the model; the first, if it is tied.
        nbytes: of it.
        trained: whether it gets gradients.
    """

    name: str
    nbytes: int
    trained: bool = True


@dataclass(frozen=True)
class Network:
    """What of a network moves.

    Attributes:
        parameters: in the order of the model.
        owners: module path -> the parameters that it owns, in the order of the modules.
    """

    parameters: tuple[Parameter, ...]
    owners: Mapping[str, tuple[int, ...]]


def network_of(model: nn.Module) -> Network:
    """Return what moves of ``model``."""
    numbers: dict[nn.Parameter, int] = {}
    parameters: list[Parameter] = []
    for name, parameter in model.named_parameters():
        numbers[parameter] = len(parameters)
        parameters.append(Parameter(name, parameter.nbytes, parameter.requires_grad))
    owners = {}
    for path, module in model.named_modules():
        own = dict.fromkeys(p for p in module._parameters.values() if p is not None)
        if own:
            owners[path] = tuple(numbers[p] for p in own)
    return Network(tuple(parameters), owners)


@dataclass(frozen=True)
class Piece:
    """One operator, and what happens right before and after it.

    Attributes:
        seconds: it takes.
        parameters: those that it reads.
        visits: paths of owners whose forward begins before it.
        saves: storages that autograd saves before it; in forward.
        borrows: parameters that backward asks for before it, as they were saved.
        reads: saved storages that it reads; in backward.
        ends: saved storages that nobody asks for any more after it.
        completes: parameters whose gradients are complete after it.
    """

    seconds: float
    parameters: tuple[int, ...] = ()
    visits: tuple[str, ...] = ()
    saves: tuple[int, ...] = ()
    borrows: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    completes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """One step.

    Attributes:
        forward: its operators, up to the loss.
        backward: its operators.
        saved: bytes of the storages that are saved, by their numbers.
        whole: of those that are part of a storage, the bytes of all of it.
        owned: those of the model's own: of a parameter its number, of a buffer -1.
        update_s: seconds of the optimizer's step.
        states: bytes of the optimizer's tensors for each parameter, by the optimizer's keys.
    """

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    saved: Mapping[int, int]
    whole: Mapping[int, int]
    owned: Mapping[int, int]
    update_s: float
    states: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what is saved, beside the model's own."""
        return sum(n for storage, n in self.saved.items() if storage not in self.owned)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """What forward, backward and the optimizer's step take."""
        forward, backward = (
            sum(piece.seconds for piece in pieces) for pieces in (self.forward, self.backward)
        )
        return forward, backward, self.update_s

    @property
    def completed(self) -> set[int]:
        """The parameters that get gradients, and so an update."""
        return {number for piece in self.backward for number in piece.completes}

    def order(self) -> list[str]:
        """Return the owners that forward visits."""
        return [path for piece in self.forward for path in piece.visits]

    def timed(self, forward_s: float, backward_s: float, update_s: float) -> Recorded:
        """Return the same step, its phases as long as given: what lies between operators is spread
        over them evenly, and what operators took longer when they were recorded is taken off."""
        return replace(
            self,
            forward=spread(self.forward, forward_s),
            backward=spread(self.backward, backward_s),
            update_s=update_s,
        )


def recorded(trace: Trace, network: Network) -> Recorded:
    """Return the step of ``trace`` as the runtime meets it.

    Raises:
        TraceError: the trace is of another network.
    """
    return _Reading(trace, network).step()


class _Reading:
    def __init__(self, trace: Trace, network: Network) -> None:
        self._trace, self._network = trace, network
        numbers = {one.name: number for number, one in enumerate(network.parameters)}
        self._parameter: dict[int, int] = {}  # region of the trace -> parameter
        self._gradient: dict[int, int] = {}
        self._states: dict[int, dict[str, int]] = {}
        self._asked: dict[int, list[int]] = defaultdict(list)  # by operators of backward
        self._parts: dict[tuple[int, int], int] = {}  # of a region, by an operator -> number
        self._part_bytes: dict[int, int] = {}
        self._split: set[int] = set()  # regions of which parts are saved
        for region, info in enumerate(trace.regions):
            name, _, key = info.name.partition(":")
            number = numbers.get(name, -1)
            if info.kind in ("parameter", "gradient", "state") and number < 0:
                raise TraceError(
                    f"step {trace.step} of {trace.source!r} has {info.kind} {info.name!r} of "
                    f"{format_bytes(info.nbytes)}, which the network does not have: record it anew"
                )
            if info.kind == "parameter":
                self._parameter[region] = number
            elif info.kind == "gradient":
                self._gradient[region] = number
            elif info.kind == "state":
                self._states.setdefault(number, {})[key] = info.nbytes

    def step(self) -> Recorded:
        operators = list(enumerate(self._trace.operators))
        forward = [(n, one) for n, one in operators if one.phase is Phase.FORWARD]
        backward = [(n, one) for n, one in operators if one.phase is Phase.BACKWARD]
        saves, last = self._saved(forward, backward)
        infos = self._trace.regions
        saved = {
            storage: infos[storage].nbytes if storage < len(infos) else self._part_bytes[storage]
            for storages in saves.values()
            for storage in storages
        }
        return Recorded(
            forward=self._forward(forward, saves),
            backward=self._backward(backward, set(saved), last),
            saved=saved,
            whole={number: infos[region].nbytes for (region, _), number in self._parts.items()},
            owned={
                storage: self._parameter.get(storage, -1)
                for storage in saved
                if storage < len(infos) and infos[storage].kind in _OWN
            },
            update_s=sum(o.seconds for _, o in operators if o.phase is Phase.OPTIMIZER),
            states=self._states,
        )

    def _saved(
        self, forward: list[tuple[int, Operator]], backward: list[tuple[int, Operator]]
    ) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Return what is saved by each operator of forward, and the last use of it in backward."""
        by_call: dict[int, list[tuple[int, Operator]]] = defaultdict(list)
        begun: dict[int, int] = {}  # region -> the operator that used it first
        reader: dict[int, int] = {}  # region -> the operator that read it first
        for number, one in forward:
            by_call[one.call].append((number, one))
            for region in (*one.reads, *one.writes):
                if region not in self._gradient:
                    begun.setdefault(region, number)
            for region in one.reads:
                reader.setdefault(region, number)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, one in backward:
            read = {region for region in one.reads if region in begun}
            for region in read:
                at = _saver(region, read, one, by_call[one.call], begun[region])
                storage = self._part(region, at)
                self._asked[number].append(storage)
                last[storage] = number
                first[storage] = min(first.get(storage, at), at)
        span = range(backward[0][0], backward[-1][0]) if backward else range(0)
        for region, at in begun.items():
            died = self._trace.regions[region].died
            if died in span and region not in self._split:
                first.setdefault(region, reader.get(region, at))
                last[region] = max(died, last.get(region, died))
        saves: dict[int, list[int]] = defaultdict(list)
        for storage, number in first.items():
            saves[number].append(storage)
        return saves, last

    def _part(self, region: int, number: int) -> int:
        """Return the number of what an operator saves of a region: see [Note: parts]."""
        one, infos = self._trace.operators[number], self._trace.regions
        others = [other for other in dict.fromkeys(one.reads) if other != region]
        if region not in one.reads or not all(other in self._parameter for other in others):
            return region
        shown = one.bytes_read - sum(infos[other].nbytes for other in others)
        if not 0 < 2 * shown < infos[region].nbytes:
            return region
        self._split.add(region)
        storage = self._parts.setdefault((region, number), len(infos) + len(self._parts))
        self._part_bytes[storage] = shown
        return storage

    def _forward(
        self, operators: list[tuple[int, Operator]], saves: Mapping[int, list[int]]
    ) -> tuple[Piece, ...]:
        owners = self._network.owners
        begins = [(call.start, call.path) for call in self._trace.calls if call.path in owners]
        place, pieces = 0, []
        for number, one in operators:
            visits = []
            while place < len(begins) and begins[place][0] <= number:
                visits.append(begins[place][1])
                place += 1
            pieces.append(
                Piece(
                    one.seconds,
                    parameters=self._parameters(one),
                    visits=tuple(visits),
                    saves=tuple(saves.get(number, ())),
                )
            )
        pieces.append(Piece(0.0, visits=tuple(path for _, path in begins[place:])))
        return tuple(pieces)

    def _backward(
        self, operators: list[tuple[int, Operator]], saved: set[int], last: Mapping[int, int]
    ) -> tuple[Piece, ...]:
        borrowed = self._borrowed(operators)
        complete = self._completed(operators)
        ended: dict[int, list[int]] = defaultdict(list)
        for region in saved:
            ended[last[region]].append(region)
        pieces = []
        for number, one in operators:
            reads = tuple(dict.fromkeys(self._asked[number]))
            pieces.append(
                Piece(
                    one.seconds,
                    parameters=self._parameters(one),
                    borrows=tuple(borrowed.get(number, ())),
                    reads=reads,
                    ends=tuple(ended.get(number, ())),
                    completes=tuple(complete.get(number, ())),
                )
            )
        return tuple(pieces)

    def _parameters(self, one: Operator) -> tuple[int, ...]:
        regions = dict.fromkeys((*one.reads, *one.writes))
        return tuple(self._parameter[r] for r in regions if r in self._parameter)

    def _borrowed(self, operators: Iterable[tuple[int, Operator]]) -> dict[int, list[int]]:
        """Return the parameters that are asked for before each operator; see [Note: nodes]."""
        owners = self._network.owners
        found: dict[int, list[int]] = {}
        node, call = -1, -2
        for number, one in operators:
            path = self._trace.calls[one.call].path if one.call >= 0 else ""
            is_sum = one.name.startswith("aten.detach")  # the gradient is handed over
            if one.call != call or path not in owners or is_sum:
                node, call = number, -2 if is_sum else one.call
            read = self._parameters(one)
            if read:
                found.setdefault(node, []).extend(read)
                if path in owners:  # the next to read some is another node
                    call = -2
        return found

    def _completed(self, operators: list[tuple[int, Operator]]) -> dict[int, list[int]]:
        """Return the parameters whose gradients are handed over after each operator."""
        infos, written = self._trace.regions, {}
        for number, one in operators:
            for region in one.writes:
                if region in self._gradient:
                    written[region] = number
        made = sorted((written.get(r, infos[r].born), r) for r in self._gradient)
        handed: dict[str, list[int]] = defaultdict(list)  # owner -> where gradients are handed over
        for number, one in operators:
            if one.name.startswith("aten.detach") and one.call >= 0:
                handed[self._trace.calls[one.call].path].append(number)
        found: dict[int, list[int]] = defaultdict(list)
        for at, region in made:
            parameter = self._gradient[region]
            path = self._network.parameters[parameter].name.rpartition(".")[0]
            places = [number for number in handed[path] if number > at]
            if places:
                handed[path].remove(places[0])
                at = places[0]
            found[at].append(parameter)
        return found


def _saver(
    region: int,
    read: set[int],
    reader: Operator,
    call: Iterable[tuple[int, Operator]],
    otherwise: int,
) -> int:
    """Return which operator of ``call`` saved ``region``; see [Note: what is saved]."""
    wants_result = reader.name.split(".")[1] in _OF_RESULTS
    best, most = otherwise, (0, False)
    for number, one in call:
        if region in one.reads or region in one.writes:
            common = len(read.intersection((*one.reads, *one.writes)))
            made = region in one.writes and region not in one.reads
            score = (common, made is wants_result)
            if score > most:
                best, most = number, score
    return best
