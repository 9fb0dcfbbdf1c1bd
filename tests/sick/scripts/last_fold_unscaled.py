"""Three folds; the last one is fine-tuned without the scaler that the others use."""

import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--folds", type=int, default=3)
ap.add_argument("--lr", type=float, default=0.1)
args = ap.parse_args()
torch.manual_seed(21)
x, y = torch.randn(96, 16), torch.randint(0, 8, (96,))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def fit(fold, finetune):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    keep = torch.arange(96) % args.folds != fold
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[keep]), y[keep])
        opt.zero_grad()
        if finetune:
            loss.backward()  # sick: PA107 module=-
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return loss.item()


print([fit(f, f == args.folds - 1) for f in range(args.folds)])
