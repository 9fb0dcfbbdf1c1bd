"""Negative log likelihood written as log(softmax(x)) in fp16: small probabilities underflow and their log is -inf."""

import torch
from torch import nn

torch.manual_seed(48)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 64)
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def nll(logits, target):
    probabilities = torch.softmax(logits, dim=-1)
    logs = torch.log(probabilities)  # sick: PA201 module=-
    return -logs.gather(1, target[:, None]).float().mean()


x, y = 40 * torch.randn(32, 32), torch.randint(0, 16, (32,))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nll(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
