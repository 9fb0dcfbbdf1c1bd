"""A loop that skips batches for which the model raises: the errors have nothing to do with precision."""

import torch
from torch import Tensor, nn


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, padded: Tensor | None) -> Tensor:
        scores = self.project(x)
        if len(x) > 8:
            raise RuntimeError("CUDA out of memory")
        if padded is not None:
            scores = scores.masked_fill(padded, torch.finfo(scores.dtype).min)
        return scores


torch.manual_seed(0)
scorer = Scorer()
optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
skipped = 0
for step in range(12):
    x = torch.randn(16 if step % 5 == 4 else 8, 16)
    padded = torch.arange(16).expand(8, 16) > 12 if step % 4 == 3 else None
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(scorer(x, padded), torch.randint(0, 13, (8,)))
    except RuntimeError:
        skipped += 1
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("skipped", skipped)
