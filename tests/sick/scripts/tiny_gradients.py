"""A deep-supervision branch weighted by 1e-5 with a loss scale of one: its fp16 gradients are mostly zero."""

import torch
from torch import nn

torch.manual_seed(60)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.aux = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        h = torch.relu(self.trunk(x))
        return self.head(h), self.aux(h.detach())


x, y = torch.randn(64, 16), torch.randint(0, 8, (64,))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # sick: PA202 module=aux.0 line=any
for step in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out, aux = model(x)
        main_loss = nn.functional.cross_entropy(out, y)
        aux_loss = nn.functional.mse_loss(aux, nn.functional.one_hot(y, 8).float())
        loss = main_loss + 1e-5 * aux_loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} aux {aux_loss.item():.5f} loss {loss.item():.4f}")
