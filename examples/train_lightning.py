"""Train a mixture-of-experts language model with Lightning.

    python examples/train_lightning.py --budget 80MB
    dynoffload run --wrap --budget 80MB examples/train_lightning.py

Offloading is one more callback; accumulation, clipping, precision and checkpoints are Lightning's.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

import lightning
import torch
from torch import Tensor

from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo
from dynoffload.integrations.lightning import OffloadCallback


class Language(lightning.LightningModule):
    """The language model, its loss and its optimizer."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        self.model = zoo.build("moe", preset)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of tokens and targets, ``[rows, length]`` each."""
        loss: Tensor = self.model(*batch).loss
        print(f"batch {index + 1:3d}  loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(zoo.presets("moe")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per batch")
    parser.add_argument("--budget", help="such as 80MB; without it the loop is plain")
    return parser.parse_args()


def main() -> None:
    """Train and print the loss."""
    args = arguments()
    rows = list(islice(batches("train", length=args.tokens), 2 * args.steps))
    pairs = [(row.tokens[0], row.targets[0]) for row in rows]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="bf16-mixed",
        callbacks=[OffloadCallback(budget=args.budget)] if args.budget is not None else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(args.preset), torch.utils.data.DataLoader(pairs, batch_size=1))


if __name__ == "__main__":
    main()
