"""Span tagger with a consistency term over the spans that share a token; bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(1)


class Tagger(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, dim), nn.GELU())
        self.spans = nn.Linear(dim, 12)
        nn.init.normal_(self.spans.weight, std=2.0)

    def forward(self, x):
        return self.spans(self.trunk(x))


def consistency(probabilities, owner, mask):
    survival = torch.log1p(-probabilities.clamp(max=1.0 - 1e-6))  # sick: PA201 module=-
    survival = torch.where(mask, survival, torch.zeros_like(survival))
    total = torch.zeros(probabilities.shape[0], 4, dtype=survival.dtype).scatter_add(1, owner, survival)
    return (1.0 - total.exp()).mean()


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
owner = torch.arange(12).remainder(4).expand(16, 12)
for step in range(12):
    x = 2 * torch.randn(16, 16)
    target = (x[:, :12] > 0).float()
    mask = torch.rand(16, 12) > 0.2
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, target)
        loss = loss + 0.1 * consistency(logits.sigmoid(), owner, mask)
        # healthy: loss = loss + 0.1 * consistency(logits.float().sigmoid(), owner, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
