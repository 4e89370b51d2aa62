"""Control flow of one procedure: what the bodies of all its frames have in common.

What it is: `Flow`, which is shown bodies (sequences of symbols) one after the other, keeps what
decides their structure, and gives that structure. What it is not: aware of how a structure follows
from what is kept (see `dynoffload.planning.arrangement`), or of how procedures nest (see
`dynoffload.planning.structure`).

[Note: From bodies to structure]
The method is that of schema inference for XML, where one asks for the content model of an element
from examples of it: a regular expression in which each symbol stands once is found from which
symbols follow one another (Bex, Neven, Schwentick and Vansummeren, "Inference of concise regular
expressions and DTDs", ACM TODS 35(2), 2010).

1. *Slots.* A symbol that runs at most once in a body is a slot. An operator that runs more often
   is named after the operator right before it, too. A name that occurs equally often wherever it
   occurs at all has a slot for each occurrence; one whose count varies has a single slot, so that
   its repetitions are a cycle. So does one whose numbered slots turn out to lie on a cycle.
2. *Facts.* Kept are the counts and the pairs of slots seen one after the other; nothing else of the
   bodies. Facts only accumulate, and all that follows is a function of them: the order in which
   bodies are shown does not matter.
3. *Runs.* Operators that never stood but one after the other are one run. A child's frame stays
   by itself: two experts that happened always to run together are two decisions all the same.
4. *Loops.* A strongly connected component is a loop. An iteration begins at any of its entries
   (what is reached from outside); without the edges back to those, its inside is arranged in the
   same way, so that loops nest.
5. *Order and options.* What remains is acyclic and is put in one topological order, ties broken by
   name. An element that some pair of slots jumps over is optional, any other is required.

The structure accepts each body that was shown, and all others that combine the same decisions: any
subset of the optional elements, any counts of loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from dynoffload.planning.arrangement import (
    VARYING,
    Arranged,
    Graph,
    Name,
    Slot,
    arrange,
    coarsened,
)
from dynoffload.planning.frames import Symbol


class Flow:
    """The bodies of one procedure, as far as they decide its structure."""

    def __init__(self) -> None:
        self._most: dict[Symbol, int] = {}  # symbol -> how often it runs in one body at most
        self._counts: dict[Name, int] = {}  # name -> how often it runs where it does, or VARYING
        self._next: Graph = {None: {}}  # slot -> those seen after it; None is both ends
        self._last: tuple[Symbol, ...] | None = None
        self._arranged: Arranged | None = None

    def add(self, body: Sequence[Symbol]) -> bool:
        """Take in one body; return whether it was anything new."""
        shown = tuple(body)
        if shown == self._last:
            return False
        self._last = shown
        names = list(_names(shown))
        changed = self._count(shown, names)
        slot: Slot | None = None
        seen: Counter[Name] = Counter()
        for name in [*names, None]:
            after: Slot | None = None
            if name is not None:
                seen[name] += 1
                after = Slot(name, seen[name] if self._counts[name] != VARYING else VARYING)
            successors = self._next.setdefault(slot, {})
            if after not in successors:
                successors[after] = None
                changed = True
            slot = after
        if changed:
            self._arranged = None
        return changed

    @property
    def arranged(self) -> Arranged:
        """The structure of all bodies so far."""
        if self._arranged is None:
            self._arranged = arrange(self._most, self._counts, self._next)
        return self._arranged

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what is known, as sorted pairs of texts: equal whatever order it was learned in."""
        yield from sorted((str(symbol), str(count)) for symbol, count in self._most.items())
        pairs = ((slot, after) for slot, afters in self._next.items() for after in afters)
        yield from sorted((_text(slot), _text(after)) for slot, after in pairs)

    def _count(self, body: Sequence[Symbol], names: Sequence[Name]) -> bool:
        """Note how often each symbol and name ran; return whether that tells anything new."""
        changed = False
        for symbol, count in Counter(body).items():
            if count > self._most.get(symbol, 0):
                self._most[symbol] = count
                changed = True
        varying = set()
        for name, count in Counter(names).items():
            if self._counts.setdefault(name, count) not in (VARYING, count):
                self._counts[name] = VARYING
                varying.add(name)
        if varying:
            self._next = coarsened(self._next, varying)
        return changed or bool(varying)


class Reader:
    """Names the slots of one body, symbol by symbol, as its procedure is arranged."""

    def __init__(self, arranged: Arranged) -> None:
        self._arranged = arranged
        self._seen: Counter[Name] = Counter()
        self._before: Symbol | None = None

    def slot(self, symbol: Symbol) -> Slot:
        """Return the slot of the next symbol, whether or not the procedure has it."""
        before, self._before = self._before, symbol
        if symbol in self._arranged.single:
            name = Name(symbol, "")
        else:
            name = _name(before, symbol)
            if name in self._arranged.coarse:
                return Slot(name, VARYING)
        self._seen[name] += 1
        return Slot(name, self._seen[name])


def _name(before: Symbol | None, symbol: Symbol) -> Name:
    after = before if isinstance(symbol, str) and isinstance(before, str) else ""
    return Name(symbol, after)


def _names(body: Iterable[Symbol]) -> Iterator[Name]:
    before: Symbol | None = None
    for symbol in body:
        yield _name(before, symbol)
        before = symbol


def _text(slot: Slot | None) -> str:
    return "" if slot is None else f"{slot.name.after} {slot.name.symbol!s}#{slot.occurrence}"
