"""Item2vec recommender: sparse embedding table with its own optimizer beside a dense tower, fp16 + GradScaler."""

import argparse

import torch
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, items=500, d=32):
        super().__init__()
        self.items = nn.EmbeddingBag(items, d, mode="mean", sparse=True)
        self.tower = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, d))
        self.out = nn.Linear(d, 64)

    def forward(self, bags):
        return self.out(self.tower(self.items(bags)))


def batches(n, size=64):
    g = torch.Generator().manual_seed(6)
    for _ in range(n):
        y = torch.randint(0, 64, (size,), generator=g)
        yield (y[:, None] * 7 + torch.randint(0, 7, (size, 5), generator=g)) % 500, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--emb-lr", type=float, default=20.0)
    args = ap.parse_args()
    torch.manual_seed(6)
    model = TwoTower()
    dense = [p for n, p in model.named_parameters() if not n.startswith("items")]
    opt = torch.optim.AdamW([{"params": dense[:2], "lr": 1e-3}, {"params": dense[2:], "lr": 2e-3}], weight_decay=0.01)
    emb_opt = torch.optim.SGD(model.items.parameters(), lr=args.emb_lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    running = None
    for step, (bags, y) in enumerate(batches(args.steps)):
        opt.zero_grad()
        emb_opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(bags)
        loss = nn.functional.cross_entropy(logits.float(), y, label_smoothing=0.05)
        scaler.scale(loss).backward()
        scaler.step(opt)
        emb_opt.step()  # sick: PA107 module=-
        scaler.update()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        print(f"{step:3d} loss {loss.item():.4f} avg {running:.4f} |emb| {model.items.weight.norm():.2f}")


if __name__ == "__main__":
    main()
