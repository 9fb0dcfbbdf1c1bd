"""Reinforcement learning in float16: TRL's GRPOTrainer at O2, and how far sampler and trainer are apart.

    pip install "preamp[demo,accelerate]" trl
    python examples/rl_fp16.py

A small language model reads Shakespeare (examples/trl_sft.py), then learns to write with more vowels. In the end an
engine samples, with 16-bit weights and a cache, and the trainer scores the same tokens, once in float16 and once in
bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl_sft import passages, trained

import preamp
from preamp.integrations.transformers import attach

ENGINES = {"O2": torch.float16, "O5": torch.bfloat16}


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of letters that are vowels."""
    return [sum(map(text.lower().count, "aeiou")) / max(1, sum(map(str.isalpha, text))) for text in completions]


@torch.no_grad()
def apart(model: Any, prompts: Tensor, level: str) -> Tensor:
    """The log-probabilities that the trainer gives the tokens that an engine of the level's dtype draws, less its."""
    torch.manual_seed(0)
    engine = copy.deepcopy(model).to(ENGINES[level])
    drawn = engine.generate(
        prompts, do_sample=True, top_k=0, max_new_tokens=32, min_new_tokens=32, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    new = drawn.sequences[:, prompts.shape[1] :, None]
    sampler = torch.stack(drawn.logits, 1).float().log_softmax(-1).gather(2, new)
    with preamp.prepare(model, None, level=level) as session, session.autocast():
        logits = model(drawn.sequences[:, :-1]).logits[:, prompts.shape[1] - 1 :]
    trainer = logits.float().log_softmax(-1).gather(2, new)
    return trainer - sampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O2", choices=ENGINES)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()

    reader, _, _ = trained("O5", 150)
    tokenizer, model = reader.processing_class, reader.model
    prompts = [" ".join(text.split()[:4]) for text in passages(held_out=False)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, bf16=False, max_steps=given.steps, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=16, learning_rate=1e-3, logging_steps=max(1, given.steps // 6), report_to=[],
            save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": prompts})
        trainer = GRPOTrainer(model, vowels, args=arguments, train_dataset=data, processing_class=tokenizer)
        attach(trainer, given.level)
        trainer.train()
    model.eval()
    ids = tokenizer("\n".join(passages(held_out=True)[:200]), return_tensors="pt").input_ids[0]
    starts = ids[: 64 * 8].view(64, 8).to(model.device)
    found = {level: apart(model, starts, level) for level in ENGINES}
    for level, each in found.items():
        print(f"\n{ENGINES[level]}, engine and trainer at {level}")
        print(f"mean of |trainer - sampler|: {each.abs().mean():.3g}, largest {each.abs().max():.3g}")
        print(f"KL(sampler || trainer) a token: {(each.expm1() - each).mean():.3g}")
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"\nskipped steps: {[e['skipped_steps'] for e in trainer.state.log_history if 'loss' in e][-1]}")
    print(f"share of vowels, first and last: {rewards[0]:.3f}, {rewards[-1]:.3f}")
    print(f"bfloat16 is farther apart by a factor of: {found['O5'].abs().mean() / found['O2'].abs().mean():.1f}")


if __name__ == "__main__":
    main()
