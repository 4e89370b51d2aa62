"""Fine-tune a transformers mixture of experts with dynoffload's expert kernels.

    python examples/train_experts.py --budget 80MB
    dynoffload run --wrap --budget 80MB examples/train_experts.py

The router is frozen, as is common in fine-tuning. ``--model`` is a directory written by
``save_pretrained``; without it an OLMoE with random weights is made.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM, set_seed

import dynoffload
import dynoffload.moe
from dynoffload.datasets.text import VOCABULARY, batches


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a directory of save_pretrained")
    parser.add_argument("--hidden", type=int, default=256, help="width, where none is given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per row")
    parser.add_argument("--budget", help="such as 80MB; without it the loop is plain")
    return parser.parse_args()


def make(directory: Path, hidden: int) -> None:
    """Save a small OLMoE with random weights."""
    set_seed(0)
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    OlmoeForCausalLM(config).save_pretrained(directory)


def main() -> None:
    """Fine-tune and print the losses."""
    args = arguments()
    dynoffload.moe.register()
    with tempfile.TemporaryDirectory() as made:
        if args.model is None:
            make(Path(made), args.hidden)
        model = AutoModelForCausalLM.from_pretrained(
            args.model or made, experts_implementation="dynoffload", dtype=torch.float32
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    samples = batches("train", length=args.tokens)

    block = contextlib.nullcontext()
    if args.budget is not None:
        block = dynoffload.offload(model, optimizer, budget=args.budget)
    with block:
        model.train()
        for step in range(1, args.steps + 1):
            for batch in islice(samples, 2):
                loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step:3d}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
