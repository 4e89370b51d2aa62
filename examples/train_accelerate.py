"""Train a mixture-of-experts language model with accelerate.

    python examples/train_accelerate.py --budget 80MB
    dynoffload run --wrap --budget 80MB examples/train_accelerate.py

``offload()`` takes the objects that ``prepare`` returns, the wrapped optimizer included.
"""

from __future__ import annotations

import argparse
import contextlib
from itertools import islice

import torch
from accelerate import Accelerator

import dynoffload
from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo


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
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = zoo.build("moe", args.preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = list(islice(batches("train", length=args.tokens), 2 * args.steps))
    pairs = [(row.tokens[0], row.targets[0]) for row in rows]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(pairs, batch_size=1)
    )

    block = contextlib.nullcontext()
    if args.budget is not None:
        block = dynoffload.offload(model, optimizer, budget=args.budget)
    with block:
        for number, (tokens, targets) in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                loss = model(tokens, targets).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            print(f"batch {number:3d}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
