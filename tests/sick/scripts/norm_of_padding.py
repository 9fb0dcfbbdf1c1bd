"""Unit-length embeddings made by x / x.norm(): the padding token embeds to zero and 0 / 0 is nan."""

import torch
from torch import nn

torch.manual_seed(43)


class UnitNorm(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)  # sick: PA201 module=embed.unit


class Embedding(nn.Module):
    def __init__(self, words, dim):
        super().__init__()
        self.table = nn.Embedding(words, dim, padding_idx=0)
        self.unit = UnitNorm()

    def forward(self, tokens):
        return self.unit(self.table(tokens))


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embedding(64, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(dim=1))


tokens = torch.randint(1, 64, (16, 8))
tokens[:, 6:] = 0
labels = torch.randint(0, 8, (16,))
model = BagOfWords()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss.item())
