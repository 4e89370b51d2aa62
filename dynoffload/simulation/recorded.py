"""Converts the trace of a plain step to the runtime's events: visits, saves, unpacks, gradients.

`Network` has the parameters and the modules that own them. `recorded` makes a `Recorded` from the
trace of a plain step. Nothing here depends on a budget.

[Note: what is saved]  A trace does not record what autograd saved, but which storages of forward
backward reads again. Such a storage is assumed saved in the module call whose backward reads it, by
the operator that shares most regions with the reading one. Of equals it is the first that reads it
or, if the backward formula uses forward's result, the first that made it. It is kept until its last
use in backward, or until it is freed. A storage that backward never reads (for example, only its
shape is needed) was saved by its first reader if it is freed during backward.

[Note: parts]  If an operator saves less than half of a storage, such as a row of a table, that part
is saved by itself. This is detected if the operator reads only parameters otherwise: the other
bytes it read are the part.

[Note: nodes]  Before a graph node runs, all its saved tensors are unpacked. Consecutive backward
operators of one module call that owns parameters count as one node, which ends once it has read
some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dynoffload.errors import TraceError
from dynoffload.planning.small_modules import nests
from dynoffload.profiler.trace import Operator, Phase, Trace
from dynoffload.simulation.workload import spread
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

_OF_RESULTS = frozenset(
    "_softmax_backward_data _log_softmax_backward_data sigmoid_backward tanh_backward"
    " threshold_backward elu_backward native_dropout_backward".split()
)
"""Operators of backward that use the result of the forward operator."""
_OWN = ("parameter", "buffer")


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: its name in the model; the first, if it is tied.
        nbytes: its bytes.
        trained: whether it gets gradients.
    """

    name: str
    nbytes: int
    trained: bool = True


@dataclass(frozen=True)
class Network:
    """The parameters of a network and the modules that own them.

    Attributes:
        parameters: parameters in the order of the model.
        owners: module path -> numbers of the parameters it owns, in the order of the modules.
        nests: see `dynoffload.planning.small_modules`.
    """

    parameters: tuple[Parameter, ...]
    owners: Mapping[str, tuple[int, ...]]
    nests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def network_of(model: nn.Module) -> Network:
    """Return the parameters and owners of ``model``."""
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
    return Network(tuple(parameters), owners, nests(model))


@dataclass(frozen=True)
class Piece:
    """One operator, and the events right before and after it.

    Attributes:
        seconds: its duration.
        parameters: parameters that it reads or writes.
        visits: paths of owners, and of modules around several, whose forward begins before it.
        saves: storages that autograd saves before it; in forward.
        borrows: saved parameters that backward unpacks before it.
        reads: saved storages that it reads; in backward.
        ends: saved storages that are not used after it.
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
    """One step as events of the runtime.

    Attributes:
        forward: operators of forward, including the loss.
        backward: operators of backward.
        saved: bytes of the saved storages, by their numbers.
        whole: for saved parts of a storage, the bytes of the whole storage.
        owned: saved storages of the model -> the parameter's number, -1 for a buffer.
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
        """Bytes of the saved storages, without the model's own."""
        return sum(n for storage, n in self.saved.items() if storage not in self.owned)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of forward, backward and the optimizer's step."""
        forward, backward = (
            sum(piece.seconds for piece in pieces) for pieces in (self.forward, self.backward)
        )
        return forward, backward, self.update_s

    @property
    def completed(self) -> set[int]:
        """The parameters that get gradients, and thus updates."""
        return {number for piece in self.backward for number in piece.completes}

    def order(self) -> list[str]:
        """Return the paths of the modules that forward visits, in order."""
        return [path for piece in self.forward for path in piece.visits]

    def timed(self, forward_s: float, backward_s: float, update_s: float) -> Recorded:
        """Return the same step with phases of the given seconds; see `workload.spread` for how
        operators are scaled."""
        return replace(
            self,
            forward=spread(self.forward, forward_s),
            backward=spread(self.backward, backward_s),
            update_s=update_s,
        )


def recorded(trace: Trace, network: Network) -> Recorded:
    """Return the step of ``trace`` as events of the runtime.

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
        self._unpacked: dict[int, list[int]] = defaultdict(list)  # by backward operator
        self._parts: dict[tuple[int, int], int] = {}  # (region, saving operator) -> storage
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
        """Return the storages each forward operator saves, and the last backward use of each."""
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
                self._unpacked[number].append(storage)
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
        """Return the storage number of an operator's saved part of a region: see [Note: parts]."""
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
        known = {*self._network.owners, *self._network.nests}
        begins = [(call.start, call.path) for call in self._trace.calls if call.path in known]
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
        return tuple(
            Piece(
                one.seconds,
                parameters=self._parameters(one),
                borrows=tuple(borrowed.get(number, ())),
                reads=tuple(dict.fromkeys(self._unpacked[number])),
                ends=tuple(ended.get(number, ())),
                completes=tuple(complete.get(number, ())),
            )
            for number, one in operators
        )

    def _parameters(self, one: Operator) -> tuple[int, ...]:
        regions = dict.fromkeys((*one.reads, *one.writes))
        return tuple(self._parameter[r] for r in regions if r in self._parameter)

    def _borrowed(self, operators: Iterable[tuple[int, Operator]]) -> dict[int, list[int]]:
        """Return the parameters that are unpacked before each operator; see [Note: nodes]."""
        owners = self._network.owners
        found: dict[int, list[int]] = {}
        node, call = -1, -2
        for number, one in operators:
            path = self._trace.calls[one.call].path if one.call >= 0 else ""
            is_sum = one.name.startswith("aten.detach")  # the gradient is accumulated
            if one.call != call or path not in owners or is_sum:
                node, call = number, -2 if is_sum else one.call
            read = self._parameters(one)
            if read:
                found.setdefault(node, []).extend(read)
                if path in owners:  # the next operator that reads parameters is another node
                    call = -2
        return found

    def _completed(self, operators: list[tuple[int, Operator]]) -> dict[int, list[int]]:
        """Return the parameters whose gradients are accumulated after each operator."""
        infos, written = self._trace.regions, {}
        for number, one in operators:
            for region in one.writes:
                if region in self._gradient:
                    written[region] = number
        made = sorted((written.get(r, infos[r].born), r) for r in self._gradient)
        handed: dict[str, list[int]] = defaultdict(list)  # owner -> where gradients are accumulated
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
    """Return the operator of ``call`` that saved ``region``; see [Note: what is saved]."""
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
