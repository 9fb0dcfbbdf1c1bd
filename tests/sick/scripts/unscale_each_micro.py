"""Gradients are unscaled after every micro-batch; the next one adds scaled ones onto them."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model, accumulate=4):
        self.model = model
        self.accumulate = accumulate
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def micro(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(self.model(x), y) / self.accumulate
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)  # sick: PA107 module=-
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.update()
        return loss.item()

    def fit(self, steps):
        for step in range(steps):
            loss = self.micro(torch.randn(8, 12), torch.randn(8, 1))
            if (step + 1) % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            print(step, loss)


torch.manual_seed(0)
Trainer(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))).fit(24)
