"""A trainer that asks whether a step was skipped before update() has run: its flag is never true (pytorch#44511)."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv1d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(torch.relu(self.backbone(x)).mean(dim=-1))


class Trainer:
    def __init__(self):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, total_iters=8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def training_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        skipped = self.scaler.get_scale() < before
        self.scaler.update()
        self.optimizer.zero_grad()
        if not skipped:
            self.scheduler.step()  # sick: PA108 module=-
        return loss.item()


torch.manual_seed(21)
trainer = Trainer()
inputs, labels = torch.randn(16, 8, 12), torch.randint(0, 8, (16,))
for i in range(12):
    print(f"iteration {i}: {trainer.training_step(inputs, labels):.4f}")
