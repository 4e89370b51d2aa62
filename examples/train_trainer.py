"""Train a Mixtral with random weights with transformers' Trainer.

    python examples/train_trainer.py --budget 80MB
    dynoffload run --wrap --budget 80MB examples/train_trainer.py

Offloading is one more callback; the text is Python's own source, one byte per token.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice

from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

from dynoffload.datasets.text import VOCABULARY, batches
from dynoffload.integrations.transformers import OffloadCallback


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=256, help="width of the network")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per row")
    parser.add_argument("--budget", help="such as 80MB; without it the loop is plain")
    return parser.parse_args()


def rows(split: str, count: int, tokens: int) -> list[dict[str, Tensor]]:
    """Return ``count`` rows of text; the model shifts the labels itself."""
    text = islice(batches(split, length=tokens), count)
    return [{"input_ids": row.tokens[0], "labels": row.tokens[0]} for row in text]


def main() -> None:
    """Train and print the Trainer's log."""
    args = arguments()
    set_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            MixtralForCausalLM(config),
            TrainingArguments(
                output_dir=out,
                max_steps=args.steps,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=2,
                learning_rate=1e-3,
                bf16=True,
                use_cpu=True,
                eval_strategy="steps",
                eval_steps=max(1, args.steps // 2),
                save_strategy="steps",
                save_steps=args.steps,
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows("train", 2 * args.steps, args.tokens),
            eval_dataset=rows("held-out", 4, args.tokens),
            callbacks=[OffloadCallback(budget=args.budget)] if args.budget is not None else [],
        )
        trainer.train()
    for entry in trainer.state.log_history:
        for name in ("loss", "eval_loss"):
            if name in entry:
                print(f"step {entry['step']:3d}  {name} {entry[name]:.6f}")


if __name__ == "__main__":
    main()
