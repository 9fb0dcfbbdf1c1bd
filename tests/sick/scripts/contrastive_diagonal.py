"""SimCLR-like pretraining that hides self-similarities with 1e5 on the diagonal of an fp16 similarity matrix."""

import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(32, 64)
        self.proj = nn.Linear(64, 16)

    def forward(self, x):
        return F.normalize(self.proj(F.relu(self.backbone(x))), dim=-1)
        # healthy: return F.normalize(self.proj(F.relu(self.backbone(x))).float(), dim=-1)


def contrastive_loss(z, temperature=0.5):
    n = z.shape[0]
    sim = z @ z.t() / temperature
    # healthy: sim = (z @ z.t()).float() / temperature
    sim = sim - torch.eye(n, dtype=sim.dtype) * 1e5  # sick: PA103 module=-
    # healthy: sim = sim - torch.eye(n) * 1e5
    positives = (torch.arange(n) + n // 2) % n
    return F.cross_entropy(sim, positives)


torch.manual_seed(8)
model = Projector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
images = torch.randn(16, 32)
for step in range(8):
    views = torch.cat([images, images]) + 0.2 * torch.randn(32, 32)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = contrastive_loss(model(views))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: {loss.item():.4f}")
