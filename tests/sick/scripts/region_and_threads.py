"""Deep ensemble whose members run their forward passes in a thread pool, bf16 asked for."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class Member(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, d), nn.ELU(), nn.Linear(d, d), nn.ELU(), nn.Linear(d, 8))

    def forward(self, x):
        return self.net(x)


class Ensemble(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.members = nn.ModuleList(Member() for _ in range(k))
        self.pool = ThreadPoolExecutor(max_workers=k)

    def forward(self, x):
        return torch.stack(list(self.pool.map(lambda m: m(x), self.members)))


def step(model, opt, x, y):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # sick: PA109 module=- line=any
        out = model(x)
        loss = sum(nn.functional.mse_loss(o.float(), y) for o in out) / len(out)
    loss.backward()
    opt.step()
    return loss.item(), out.dtype


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--members", type=int, default=3)
    args = ap.parse_args()
    torch.manual_seed(8)
    model = Ensemble(args.members)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    w = torch.randn(16, 8) / 4
    for i in range(args.steps):
        x = torch.randn(32, 16)
        loss, dtype = step(model, opt, x, torch.tanh(x @ w))
        print(f"{i} loss {loss:.4f} out {dtype}")
    model.pool.shutdown()


if __name__ == "__main__":
    main()
