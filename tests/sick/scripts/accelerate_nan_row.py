"""One row of the data is NaN, under Accelerate with accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
x, y = torch.randn(128, 16), torch.randint(0, 8, (128,))
x[83, 4] = float("nan")
acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4, cpu=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt, dl = acc.prepare(model, opt, DataLoader(TensorDataset(x, y), batch_size=8))
for xb, yb in dl:
    with acc.accumulate(model):
        loss = nn.functional.cross_entropy(model(xb), yb)  # sick: PA207 module=0
        acc.backward(loss)
        if acc.sync_gradients:
            acc.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    print(loss.item())
