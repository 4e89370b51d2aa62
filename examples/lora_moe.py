"""Fine-tune a mixture of experts that is larger than memory, by LoRA, with transformers' Trainer.

    python examples/lora_moe.py /var/tmp/moe --make            # 8 GB of random weights in bfloat16
    python examples/lora_moe.py /var/tmp/moe --budget 1.5GB    # in less than 2 GB of memory

The first command writes a Qwen3-MoE layer by layer, as `save_pretrained` would: take one of your
own in its place. The text is Python's own source, one byte per token.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from dynoffload.datasets.text import batches
from dynoffload.experiments.moe_checkpoint import qwen3_moe, write
from dynoffload.integrations.transformers import OffloadCallback, materialize


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="directory of the checkpoint")
    parser.add_argument("--make", action="store_true", help="write it, with random weights")
    parser.add_argument("--layers", type=int, default=27, help="of the network")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the network")
    parser.add_argument("--experts", type=int, default=64, help="in each layer")
    parser.add_argument("--budget", help="such as 1.5GB; without it the loop is plain")
    parser.add_argument("--steps", type=int, default=5, help="of training")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per step")
    parser.add_argument("--adapter", type=Path, help="directory to save the adapter to")
    return parser.parse_args()


def make(args: argparse.Namespace) -> None:
    """Write a checkpoint of random weights, one file per layer."""
    config = qwen3_moe(args.layers, args.hidden, args.experts)
    for number, total in write(args.path, config):
        print(f"{number} of {args.layers + 1} files, {total / 1e6:,.0f} MB", flush=True)


def main() -> None:
    """Train and print the losses."""
    args = arguments()
    if args.make:
        make(args)
        return
    set_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    if args.budget is None:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.path), lora)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.path))
        model = get_peft_model(model, lora)
        materialize(model, args.path)
    rows = [
        {"input_ids": row.tokens[0], "labels": row.tokens[0]}
        for row in islice(batches("train", length=args.tokens), args.steps)
    ]
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=out,
                max_steps=args.steps,
                per_device_train_batch_size=1,
                learning_rate=1e-3,
                gradient_checkpointing=True,
                use_cpu=True,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            callbacks=[OffloadCallback(budget=args.budget)] if args.budget is not None else [],
        )
        trainer.train()
    if args.adapter is not None:
        model.save_pretrained(args.adapter)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']:3d}  loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
