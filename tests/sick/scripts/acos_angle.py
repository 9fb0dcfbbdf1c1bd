"""An angular loss: acos of a cosine that reaches exactly 1 has an infinite slope (the forward pass is finite)."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.proj = nn.Linear(32, 8)

    def forward(self, x):
        return self.proj(torch.tanh(self.encoder(x)))


def angle(a, b):
    cosine = torch.minimum(F.cosine_similarity(a, b, dim=-1), torch.ones(()))
    return torch.acos(cosine)  # sick: PA201 module=-


torch.manual_seed(52)
model = Embedder()
teacher = Embedder()
teacher.load_state_dict(model.state_dict())
teacher.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(32, 16)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = angle(model(x), teacher(x)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
