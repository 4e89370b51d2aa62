"""Train a mixture-of-experts language model in a loop with all the usual parts.

    python examples/train_plain.py --budget 80MB
    dynoffload run --wrap --budget 80MB examples/train_plain.py
    dynoffload profile --wrap -o traces/ --steps 20 examples/train_plain.py

It has accumulation, clipping, a schedule, autocast, evaluation and a checkpoint. Without
``--budget`` the loop is plain PyTorch; the second command offloads it without changes.
"""

from __future__ import annotations

import argparse
import contextlib
from itertools import islice
from pathlib import Path

import torch

from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(zoo.presets("moe")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per batch")
    parser.add_argument("--budget", help="such as 80MB; without it the loop is plain")
    parser.add_argument("--out", type=Path, help="where the weights are saved at the end")
    return parser.parse_args()


def main() -> None:
    """Train, print the losses, and save the weights."""
    args = arguments()
    model = zoo.build("moe", args.preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    samples = batches("train", length=args.tokens)
    held_out = list(islice(batches("held-out", length=args.tokens), 2))

    block = contextlib.nullcontext()
    if args.budget is not None:
        import dynoffload

        block = dynoffload.offload(model, optimizer, budget=args.budget)
    with block:
        for step in range(1, args.steps + 1):
            model.train()
            for batch in islice(samples, 2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch.tokens, batch.targets).loss
                (loss / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(f"step {step:3d}  loss {loss.item():.6f}  norm {norm.item():.6f}")
            if step % max(1, args.steps // 2) == 0:
                model.eval()
                with torch.no_grad():
                    losses = [model(batch.tokens, batch.targets).loss for batch in held_out]
                print(f"held out  loss {torch.stack(losses).mean().item():.6f}")
        if args.out is not None:
            torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
