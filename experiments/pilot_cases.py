"""The networks that pilots are scored on: which, at which size, on which samples.

Sizes are the smallest of the zoo's: the number of codes and sites makes a network hard to foretell.
The Mixtral of transformers is not among them: its experts are one fused parameter behind one
module, so that every step of it runs the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STRUCTURE, DATA = "structure", "data"
"""Where a step's path comes from: what the sample shows before it, or what the network computes."""


@dataclass(frozen=True)
class Case:
    """One network with one shape of samples.

    Attributes:
        key: where its numbers stand in the JSON.
        network: name in the zoo.
        preset: its sizes.
        shape: of its samples.
        title: what tables call it.
        origin: `STRUCTURE` or `DATA`.
        lr: AdamW's learning rate.
        before: steps that are trained before the recording begins, so that there is something to
            decide: an exit that was never sure is no exit.
        share: of the samples asked for that are recorded, where a step takes long and its path
            follows from one number.
    """

    key: str
    network: str
    preset: str
    shape: dict[str, int] = field(default_factory=dict)
    title: str = ""
    origin: str = DATA
    lr: float = 3e-4
    before: int = 0
    share: float = 1.0


def _structure(key: str, network: str, title: str, preset: str = "tiny", share: float = 1) -> Case:
    return Case(key, network, preset, title=title, origin=STRUCTURE, share=share)


def _experts(key: str, network: str, preset: str, length: int, title: str) -> Case:
    return Case(key, network, preset, {"length": length}, f"{title}, {length} tokens")


CASES: dict[str, Case] = {
    case.key: case
    for case in (
        _structure("tree", "tree", "Child-Sum Tree-LSTM"),
        _structure("tree_untied", "tree", "Tree-LSTM, 12 cells by kind", "tiny-untied"),
        _structure("tree_cnn", "tree-cnn", "tree CNN"),
        _structure("masked", "masked", "masked encoder, any length"),
        _structure("slim", "slim", "slimmable, 4 widths"),
        _structure("gan", "gan", "unrolled GAN"),
        _structure("evoformer", "evoformer", "Evoformer, recycling"),
        _structure("esmfold", "esmfold", "ESMFold, recycling", share=0.25),
        Case("early_lstm", "early-lstm", "tiny", title="early-ending LSTM", lr=1e-3, before=1000),
        _experts("switch_32", "switch", "tiny", 64, "Switch, 32 experts"),
        _experts("switch_128", "switch", "tiny-128", 64, "Switch, 128 experts"),
        _experts("moe_8", "moe", "tiny-wide", 8, "top-2 of 64"),
        _experts("moe_64", "moe", "tiny-wide", 64, "top-2 of 64"),
        _experts("moe_512", "moe", "tiny-wide", 512, "top-2 of 64"),
        Case("exits", "exits", "tiny", title="multi-scale exits", before=700),
        Case("skips", "skips", "tiny", title="skip net", lr=1e-3, before=200),
        Case(
            "depths",
            "depths",
            "tiny",
            {"length": 16},
            "mixture of depths, 16 tokens",
            lr=1e-3,
            before=100,
        ),
    )
}
"""All networks of the zoo whose steps differ, by key."""
