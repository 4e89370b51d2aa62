"""The table of cases of `dynoffload.experiments.gpu_check`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from dynoffload.experiments.loops import Loop


class Kind(Enum):
    """What a case demonstrates; each kind needs at least one exact case."""

    HOST = "host memory"
    FILE = "a file below host memory"
    RACES = "no race"
    TILES = "tiles"
    IN_BACKWARD = "the optimizer in backward"
    COUNTED = "the allocator's peak within the budget"
    HOST_OPTIMIZER = "the optimizer on the host"


@dataclass(frozen=True)
class Case:
    """One network, trained with one loop and one set of options.

    Attributes:
        network: a network of the zoo, or ``transformers:`` and an architecture of
            `dynoffload.experiments.architectures`.
        loop: how it is trained.
        kind: what it demonstrates. `Kind.COUNTED` takes a larger network and compares only losses
            until the end, as copies for comparing would count. So does `Kind.IN_BACKWARD`, whose
            gradients are gone.
        files: half of the training state is in a spill file below host memory.
        seed: of the stream delays, for `Kind.RACES`.
        lies: seed of a pilot that predicts wrongly, or None for none.
        starts_there: the model is on the accelerator before the block begins, not on the CPU.
    """

    network: str
    loop: Loop
    kind: Kind = Kind.HOST
    files: bool = False
    seed: int = 0
    lies: int | None = None
    starts_there: bool = False

    def describe(self) -> str:
        """Return a short description."""
        ways = [
            self.kind.value,
            f"late queues {self.seed}" if self.kind is Kind.RACES else "",
            "a file" if self.files and self.kind is not Kind.FILE else "",
            "" if self.lies is None else f"lying pilot {self.lies}",
            "from the accelerator" if self.starts_there else "",
        ]
        return f"{self.network}: {self.loop.describe()}; {', '.join(filter(None, ways))}"


_ZOO = ("moe", "tree", "depths", "early-lstm", "evoformer")
_NETWORKS = (*_ZOO, "transformers:mixtral", "transformers:qwen3-moe", "transformers:llama")
_LOOPS = (
    Loop("AdamW foreach", clip="norm", accumulate=2),
    Loop("AdamW fused", autocast="bfloat16"),
    Loop("SGD momentum", autocast="float16", clip="norm"),
    Loop("RMSprop centered", clip="value"),
    Loop("AdamW fused", weights="bfloat16"),
)
_CHECKPOINTED = (
    Loop("AdamW foreach", checkpointing="not reentrant"),
    Loop("AdamW fused", checkpointing="reentrant", accumulate=2),
)
_IN_BACKWARD = ("moe", "transformers:qwen3-moe", "evoformer")
_LATE = ("moe", "evoformer", "transformers:mixtral", "early-lstm")


def cases(steps: int = 4) -> list[Case]:
    """Return all cases, the most informative first, in case time runs out.

    Args:
        steps: of each case.
    """
    plain, fused = Loop("AdamW foreach"), Loop("AdamW fused")
    races = [
        Case(name, plain, Kind.RACES, seed % 2 == 1, seed, lies=seed if seed % 4 > 1 else None)
        for seed, name in enumerate(_LATE * 2)
    ]

    def below(network: str, loop: Loop, files: bool, **more: Any) -> Case:
        return Case(network, loop, Kind.FILE if files else Kind.HOST, files, **more)

    found = [Case(name, plain) for name in _NETWORKS]
    found += [*races[:4], Case("moe", fused, Kind.TILES)]
    found += [
        Case("moe", Loop("AdamW fused", clip="norm", weights="bfloat16"), Kind.HOST_OPTIMIZER),
        Case("moe", Loop("AdamW fused", weights="bfloat16"), Kind.HOST_OPTIMIZER, files=True),
    ]
    found += [below(name, fused, True, starts_there=True) for name in _NETWORKS]
    found += [
        below("moe", loop, number % 2 == 1, starts_there=number % 2 == 0)
        for number, loop in enumerate(_LOOPS)
    ]
    found += [
        Case(name, loop, Kind.IN_BACKWARD, number % 2 == 1, starts_there=number % 2 == 0)
        for number, (name, loop) in enumerate(product(_IN_BACKWARD, (plain, fused)))
    ]
    found += [Case("transformers:llama", loop) for loop in _CHECKPOINTED]
    found += [below("moe", fused, seed % 2 == 1, lies=seed) for seed in range(4)]
    found += [Case("moe", fused, Kind.COUNTED, files, starts_there=True) for files in (False, True)]
    found += races[4:]
    return [replace(case, loop=replace(case.loop, steps=steps)) for case in found]
