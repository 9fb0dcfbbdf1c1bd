"""Hugging Face GPT-2 in fp16 with scaler, unscale_ and clipping, as the documents say."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(4)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    ids = torch.randint(0, 64, (4, 16))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
