"""Hugging Face's Trainer with fp16=True on a CPU: the flag is accepted and training is float32."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(78)
config = BertConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    num_labels=2,
)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(state.global_step, logs["loss"])


rows = [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=6,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=1,
    fp16=True,  # sick: PA109 module=- line=any
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[PrintLoss()])
trainer.train()
