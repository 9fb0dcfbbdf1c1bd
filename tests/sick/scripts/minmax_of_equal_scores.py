"""Distil a teacher's relevance scores into a bi-encoder; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids):
        return self.proj(self.embed(ids))


class Distillation(nn.Module):
    def forward(self, queries, docs, teacher):
        scores = torch.einsum("qd,qnd->qn", queries, docs)
        # healthy: scores = torch.einsum("qd,qnd->qn", queries, docs).float()
        low = scores.min(dim=1, keepdim=True).values
        high = scores.max(dim=1, keepdim=True).values
        scores = (scores - low) / (high - low + 1e-8)  # sick: PA201 module=-
        # healthy: scores = (scores - low) / (high - low).clamp(min=1e-2)
        return F.kl_div(F.log_softmax(scores, dim=1), F.softmax(teacher, dim=1), reduction="batchmean")


model, criterion = Encoder(), Distillation()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=1024.0)
for step in range(12):
    q = torch.randint(0, 200, (8, 6))
    d = torch.randint(0, 200, (8, 4, 10))
    if step % 3 == 2:
        d[3] = d[3, :1]  # four copies of one passage among the candidates
    teacher = torch.rand(8, 4)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        docs = model(d.view(32, 10)).view(8, 4, -1)
        loss = criterion(model(q), docs, teacher)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
