"""A small transformer reads handwritten digits row by row, in float16 with torch.amp.

It has an overflow of its own: attention scores that are never divided by sqrt(d). As the weights grow
the scores pass 65504, the largest number of float16, and from then on every step is skipped.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--scaled", action="store_true", help="divide the scores by sqrt(d): the cure")
arguments = parser.parse_args()
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        if arguments.scaled:
            scores = scores / x.shape[-1] ** 0.5
        return F.softmax(scores, -1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.feed(x)


class Reader(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        return self.head(self.blocks(self.embed(rows)).mean(1))


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)
labels = torch.tensor(digits.target)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(arguments.steps):
    batch = torch.randint(0, len(images), (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
