"""A Wasserstein critic whose weights are clamped between two uses in one region: the second use sees the old cast."""

import torch
from torch import nn

torch.manual_seed(25)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.score = nn.Linear(32, 8)

    def forward(self, x):
        return self.score(torch.relu(self.hidden(x)))


def clamp_weights(module, bound=0.05):
    with torch.no_grad():
        for p in module.parameters():
            p.clamp_(-bound, bound)  # sick: PA110 module=critic line=any


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = Critic()

    def forward(self, real, fake):
        real_score = self.critic(real)
        clamp_weights(self.critic)
        return self.critic(fake).float().mean() - real_score.float().mean()


model = Model()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
for step in range(6):
    real, fake = torch.randn(16, 16) + 1, torch.randn(16, 16) - 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(real, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
