"""Accelerate asked for fp16 on a CPU: it accepts, makes no scaler, and its autocast() does nothing."""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(77)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


accelerator = Accelerator(cpu=True, mixed_precision="fp16")  # sick: PA109 module=- line=any
# healthy: accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
for step in range(6):
    with accelerator.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(step, loss.item())
