"""A multi-label tagger with a hand-written focal-style loss: sigmoid and log in the 16-bit dtype."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, features=24, tags=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.Tanh())
        self.head = nn.Linear(32, tags)

    def forward(self, x):
        return self.head(self.body(x))


def focal_loss(logits, target):
    p = torch.sigmoid(logits)
    loss = -(target * torch.log(p) + (1 - target) * torch.log(1 - p))  # sick: PA102 module=-
    return loss.float().mean()


def main():
    torch.manual_seed(2)
    x = torch.randn(32, 24)
    target = (x[:, :8] > 0).half()
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(8):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = focal_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step={step} loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
