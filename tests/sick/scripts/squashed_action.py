"""SAC: log(1 - tanh(u)^2 + 1e-6) of a squashed action in a bf16 region, where tanh of a large u is 1."""

import torch
from torch import nn

torch.manual_seed(29)
actor = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)


def sample(out):
    mean, log_std = out.chunk(2, -1)
    noise = torch.randn_like(mean)
    u = 3 * mean + log_std.clamp(-5, 2).exp() * noise
    action = torch.tanh(u)
    # healthy: action = torch.tanh(u.float())
    log_prob = -0.5 * noise**2 - log_std - 0.919 - torch.log(1 - action**2 + 1e-6)  # sick: PA104 module=-
    return action, log_prob.sum(-1)


for step in range(6):
    obs = torch.randn(256, 8) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        action, log_prob = sample(actor(obs))
    loss = (0.2 * log_prob.float() + (action.float() - obs[:, :4].sign()).square().sum(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
