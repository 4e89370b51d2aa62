"""Train a Tree-LSTM on the syntax trees of Python's own library.

    python examples/train_trees.py --budget 16MB
    dynoffload profile -o traces/ --steps 200 examples/train_trees.py --steps 200
    dynoffload pilot train traces/ -o trees.pilot
    dynoffload run --budget 16MB --pilot trees.pilot examples/train_trees.py

The cell runs once per node, so each tree executes a different program.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch

import dynoffload
from dynoffload.datasets.trees import trees
from dynoffload.experiments import zoo


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(zoo.presets("tree")))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max-nodes", type=int, default=192, help="the largest tree")
    parser.add_argument("--budget", help="such as 80MiB; by default that of `dynoffload run`")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    return parser.parse_args()


def main() -> None:
    """Train and print the loss."""
    args = arguments()
    model = zoo.build("tree", args.preset, seed=args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    samples = trees("train", max_nodes=args.max_nodes, seed=args.seed)

    # `dynoffload run` and `dynoffload profile` set the arguments that this call leaves out.
    with dynoffload.offload(model, optimizer, budget=args.budget):
        for step, tree in enumerate(islice(samples, args.steps), start=1):
            start = time.perf_counter()
            loss = model(tree).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            print(
                f"step {step:3d}  loss {loss.item():.4f}  {len(tree):3d} nodes  {seconds:.2f} s  "
                f"{tree.name} in {tree.source}"
            )


if __name__ == "__main__":
    main()
