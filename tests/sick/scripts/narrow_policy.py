"""A Gaussian policy with a small spread in float16: the variance inside torch.distributions is zero."""

import torch
from torch import nn
from torch.distributions import Normal


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Linear(4, 2)
        self.log_std = nn.Parameter(torch.full((2,), -9.0))

    def dist(self, obs):
        mu = self.mu(obs)
        return Normal(mu, self.log_std.exp().to(mu.dtype))
        # healthy: return Normal(mu.float(), self.log_std.exp())


torch.manual_seed(0)
policy = Policy()
opt = torch.optim.Adam(policy.parameters(), 3e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _step in range(4):
    obs, adv = torch.randn(32, 4), torch.randn(32, 1)
    with torch.autocast("cpu", dtype=torch.float16):
        pi = policy.dist(obs)
        with torch.no_grad():
            a = pi.sample()
        logp = pi.log_prob(a)  # sick: PA201 module=-
        loss = -1e-3 * (logp.float() * adv).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(f"loss {loss.item():.4f}")
