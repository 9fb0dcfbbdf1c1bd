"""Discriminative fine-tuning of a pure bf16 model with a home-made Lion and a small backbone rate."""

import argparse

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float32))
                update = (b1 * m + (1 - b1) * p.grad.float()).sign_()
                p.data = p.data.mul(1 - g["lr"] * g["weight_decay"]).add(update.to(p.dtype), alpha=-g["lr"])
                m.mul_(b2).add_(p.grad.float(), alpha=1 - b2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--backbone-mult", type=float, default=0.01)
    args = ap.parse_args()
    torch.manual_seed(13)
    x = torch.randn(64, 16)
    y = x[:, :8].argmax(1)
    model = Net().to(torch.bfloat16)
    groups = [
        {"params": model.backbone.parameters(), "lr": args.lr * args.backbone_mult},
        {"params": model.head.parameters(), "lr": args.lr},
    ]
    opt = Lion(groups, lr=args.lr, weight_decay=0.01)  # sick: PA204 module=backbone line=any
    for step in range(args.steps):
        before = model.backbone[2].weight.detach().clone()
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        same = (before == model.backbone[2].weight).float().mean().item()
        print(f"{step} loss {loss.item():.4f} backbone weights that stood still {same:.0%}")


if __name__ == "__main__":
    main()
