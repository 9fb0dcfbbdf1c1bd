"""TRL's SFTTrainer at O5: a small language model reads Shakespeare.

    pip install "preamp[demo,accelerate]" trl
    python examples/trl_sft.py

The program is written as for TRL alone, but for `bf16=False`: TRL's own mixed precision is on by default.
`attach(trainer, level)` is the only line of preamp.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from preamp.integrations.transformers import attach
from preamp.zoo.bert import is_held_out, lines, paths

PIECES, LENGTH = 512, 64


def passages(held_out: bool) -> list[str]:
    """Ten lines each."""
    every = [line for path in paths() if is_held_out(path) == held_out for line in lines(path)]
    return ["\n".join(every[i : i + 10]) for i in range(0, len(every), 10)]


def tokenizer_of(text: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=PIECES, special_tokens=["<pad>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def model_of(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers, 130 thousand parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(level: str, steps: int) -> tuple[SFTTrainer, float, float]:
    """The trainer after training, and the loss on plays held out, before and after."""
    train, test = passages(held_out=False), passages(held_out=True)[:200]
    tokenizer = tokenizer_of(train[:500])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, bf16=False, max_length=LENGTH, max_steps=steps, per_device_train_batch_size=16,
            learning_rate=3e-3, warmup_steps=steps // 10, logging_steps=max(1, steps // 5), report_to=[],
            save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            model_of(tokenizer), arguments, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"text": train}), eval_dataset=Dataset.from_dict({"text": test}),
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        attach(trainer, level)
        trainer.train()
        return trainer, before, trainer.evaluate()["eval_loss"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()

    _, before, after = trained(given.level, given.steps)
    print(f"loss on plays held out, before and after: {before:.4f}, {after:.4f}")
    print(f"it fell by: {before - after:.4f}")


if __name__ == "__main__":
    main()
