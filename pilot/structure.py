"""The structure of a network's orders: the template of its slots, and a model of each loop.

`learn_structure` finds it from recorded orders; `Structure.decode` turns the chances of the slots
into an order of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynoffload.pilot.features import Floats
from dynoffload.pilot.loops import LoopModel, Rule, learn_loop
from dynoffload.pilot.template import LOOP, OrderTemplate, learn_template, tokens
from dynoffload.planning.blocks import Block
from dynoffload.profiler.input_features import InputFeatures

MAX_UNROLLED = 768
"""The longest loop that is unrolled into a slot for each block."""
MAX_ORDER = 1 << 20
"""The most blocks of one prediction; longer orders are cut off."""


@dataclass(frozen=True)
class Structure:
    """What the orders of all samples share.

    Attributes:
        template: the slots.
        loops: a model for each of the template's loops, in its order.
    """

    template: OrderTemplate
    loops: tuple[LoopModel, ...] = ()

    def decode(
        self, sample: InputFeatures, chances: Floats, start: int = 0
    ) -> tuple[list[int], Floats]:
        """Return the order of the slots that are likely, and the chance of each of its blocks.

        Args:
            sample: the sample of the step.
            chances: P(runs) of the slots of one block, ``[single]``.
            start: the slot to begin at.
        """
        template = self.template
        surety = np.ones(len(template.slots), np.float32)
        surety[template.single] = chances
        taken = surety >= 0.5
        taken[:start] = False
        blocks: list[int] = []
        confidence: list[Floats] = []
        at = start
        ends = zip((*template.loops, len(taken)), (*self.loops, None), strict=True)
        for place, loop in ends:
            if place < start or len(blocks) >= MAX_ORDER:
                continue
            part = taken[at:place]
            blocks += template.blocks[at:place][part].tolist()
            confidence.append(surety[at:place][part])
            if loop is not None:
                run = loop.predict(sample)
                blocks += run
                confidence.append(np.full(len(run), loop.fidelity, dtype=np.float32))
            at = place + 1
        return blocks[:MAX_ORDER], np.concatenate(confidence)[:MAX_ORDER]


def learn_structure(
    blocks: Sequence[Block], samples: Sequence[InputFeatures], orders: Sequence[Sequence[int]]
) -> Structure:
    """Learn the template and its loops.

    A loop is unrolled if no rule gives its length and all its runs are its longest run with parts
    left out (such as its end). Each of its calls then has a slot of its own.

    Args:
        blocks: the vocabulary's blocks.
        samples: of the recorded steps; none for the structure before the first.
        orders: blocks that each ran.

    Raises:
        PilotError: if there are too many slots.
    """
    unrolled: frozenset[int] = frozenset()
    while True:
        template = learn_template(orders, blocks, unrolled)
        filled = [tokens(order, template.families) for order in orders]
        slots = [template.slots[place] for place in template.loops]
        runs = [[f.get(slot, ()) for f in filled] for slot in slots]
        loops = tuple(learn_loop(samples, each, blocks) for each in runs)
        if unrolled:
            return Structure(template, loops)
        for slot, loop, each in zip(slots, loops, runs, strict=True):
            longest = max(each, key=len)
            alone = sum(other[0] == slot[0] for other in slots) == 1
            nested = alone and all(_is_part(run, longest) for run in set(each))
            if nested and not isinstance(loop.how, Rule) and len(longest) <= MAX_UNROLLED:
                unrolled |= template.families[LOOP - slot[0]]
        if not unrolled:
            return Structure(template, loops)


def _is_part(run: Sequence[int], longest: Sequence[int]) -> bool:
    """Return whether ``run`` is ``longest`` with some calls left out; the n-th call of a block in
    one matches the n-th in the other."""

    def calls(blocks: Sequence[int]) -> list[tuple[int, int]]:
        seen: Counter[int] = Counter()
        found = []
        for block in blocks:
            found.append((block, seen[block]))
            seen[block] += 1
        return found

    ran = calls(run)
    there = set(ran)
    return [call for call in calls(longest) if call in there] == ran
