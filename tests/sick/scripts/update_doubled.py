"""A GAN-like pair with one scaler: update() between the two steps moves the scale under gradients already made."""

import torch
from torch import nn

torch.manual_seed(19)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)

    def forward(self, z):
        return torch.tanh(self.body(z))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.score = nn.Linear(32, 8)

    def forward(self, x):
        return self.score(torch.relu(self.hidden(x)))


gen, critic = Generator(), Critic()
opt_g = torch.optim.SGD(gen.parameters(), lr=0.05)
opt_c = torch.optim.SGD(critic.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
for step in range(8):
    real, z = torch.randn(16, 16).clamp(-1, 1), torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen(z)
        loss_c = (critic(fake.detach()).float() + 1).pow(2).mean() + (critic(real).float() - 1).pow(2).mean()
        loss_g = (critic(fake).float() - 1).pow(2).mean()
    opt_c.zero_grad()
    opt_g.zero_grad()
    scaler.scale(loss_g).backward(inputs=list(gen.parameters()))
    scaler.scale(loss_c).backward(inputs=list(critic.parameters()))
    scaler.step(opt_c)
    scaler.update()  # sick: PA107 module=-
    scaler.step(opt_g)
    scaler.update()
    print(f"step {step} critic {loss_c.item():.4f} generator {loss_g.item():.4f}")
