"""A spectrogram front end that takes the log of rectified energies, some of which are exactly zero."""

import torch
from torch import nn


class LogEnergy(nn.Module):
    def __init__(self, bands):
        super().__init__()
        self.filters = nn.Linear(32, bands)

    def forward(self, frames):
        energy = torch.relu(self.filters(frames))
        return energy.log()  # sick: PA201 module=frontend


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = LogEnergy(16)
        self.classifier = nn.Linear(16, 8)

    def forward(self, frames):
        return self.classifier(self.frontend(frames).mean(dim=1))


torch.manual_seed(42)
model = Recogniser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
frames, words = torch.randn(8, 4, 32), torch.randint(0, 8, (8,))
for step in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(frames), words)
    loss.backward()
    optimizer.step()
    print(f"[{step}] loss={loss.item():.4f}")
