"""A tiny GPT-2 fine-tuned in a plain loop under an fp16 region, without a gradient scaler (transformers examples)."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(79)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 64, (4, 16))
for step in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()  # sick: PA107 module=-
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
