"""Float32 masters kept by hand for a half model with LayerNorm in float32: the recipe of 2018, done right."""

import torch
from torch import nn

torch.manual_seed(11)
LOSS_SCALE = 128.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        h = self.norm(self.encoder(x).float()).half()
        return self.head(torch.relu(h))


model = Net()
masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
model.half()
model.norm.float()
optimizer = torch.optim.SGD(masters, lr=0.2)
x, y = torch.randn(32, 16).half(), torch.randint(0, 8, (32,))
for step in range(8):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    (loss * LOSS_SCALE).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float() / LOSS_SCALE
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    print(f"step {step} loss {loss.item():.4f}")
