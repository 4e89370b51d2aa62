"""Train a mixture-of-experts language model in two processes, each under its own budget.

    torchrun --nproc-per-node 2 examples/two_processes.py --budget 200MB
    torchrun --nproc-per-node 2 -m dynoffload run --budget 200MB examples/two_processes.py --offload

The model is wrapped in `DistributedDataParallel` first; the wrapped model is passed to `offload`.
Without ``--budget`` and ``--offload`` this is plain PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynoffload.datasets.text import batches
from dynoffload.experiments import zoo


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(zoo.presets("moe")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per batch")
    parser.add_argument("--budget", help="of each rank, such as 200MB")
    parser.add_argument("--offload", action="store_true", help="the budget is the launcher's")
    return parser.parse_args()


def main() -> None:
    """Train, and print the losses and a hash of the weights on the first rank."""
    args = arguments()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model = DistributedDataParallel(zoo.build("moe", args.preset), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = batches("train", length=args.tokens, seed=dist.get_rank())

    block = contextlib.nullcontext()
    if args.offload or args.budget is not None:
        import dynoffload

        block = dynoffload.offload(
            model, optimizer, budget=args.budget, config={"rank_timeout": 120}
        )
    with block:
        for step, batch in enumerate(islice(samples, args.steps), 1):
            loss = model(batch.tokens, batch.targets).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if first:
                print(f"step {step:3d}  loss {loss.item():.6f}  norm {norm.item():.6f}", flush=True)
    if first:
        weights = hashlib.sha256()
        for parameter in model.parameters():
            weights.update(parameter.detach().numpy().tobytes())
        print(f"weights {weights.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
