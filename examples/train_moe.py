"""Train a mixture-of-experts language model on Python's own source text.

    python examples/train_moe.py --budget 80MiB
    dynoffload profile -o traces/ --steps 60 examples/train_moe.py --steps 60
    dynoffload pilot train traces/ -o moe.pilot
    dynoffload run --budget 80MiB --pilot moe.pilot examples/train_moe.py

What it is: an ordinary training loop with one more line, the ``with``. What it is not: tied to the
command line; `dynoffload.offload` takes budget and pilot as arguments too.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch

import dynoffload
from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(zoo.presets("moe")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per step")
    parser.add_argument("--budget", help="such as 80MiB; by default that of `dynoffload run`")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    return parser.parse_args()


def main() -> None:
    """Train and print the loss."""
    args = arguments()
    model = zoo.build("moe", args.preset, seed=args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    samples = batches("train", length=args.tokens, seed=args.seed)

    # What this call leaves open, `dynoffload run` and `dynoffload profile` set.
    with dynoffload.offload(model, optimizer, budget=args.budget):
        for step, batch in enumerate(islice(samples, args.steps), start=1):
            start = time.perf_counter()
            loss = model(batch.tokens, batch.targets).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            print(f"step {step:3d}  loss {loss.item():.4f}  {seconds:.2f} s  {batch.source}")


if __name__ == "__main__":
    main()
