"""An additive mask of -1e9 on bf16 scores: bfloat16 has the range of float32, so the constant is finite."""

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, keep):
        scores = self.query(x) @ self.key(x).mT / x.shape[-1] ** 0.5
        scores = scores + (1.0 - keep[:, None].to(scores.dtype)) * -1e9
        return scores.softmax(-1) @ self.value(x)


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.attention = SelfAttention(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x, keep):
        return self.head(self.attention(x, keep)[:, 0])


if __name__ == "__main__":
    torch.manual_seed(6)
    x, y = torch.randn(16, 8, 16), torch.randint(0, 8, (16,))
    keep = torch.arange(8)[None] < torch.randint(2, 9, (16, 1))
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for i in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x, keep), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"iter {i} loss {loss.item():.4f}")
