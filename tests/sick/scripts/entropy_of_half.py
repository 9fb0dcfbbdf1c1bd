"""Actor with an entropy bonus computed from the probabilities; the policy runs in float16."""

import sys

import torch
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(5)
actor = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 6))
nn.init.normal_(actor[2].weight, std=1.5)
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=256.0)
for step in range(10):
    obs = torch.randn(64, 12)
    advantage = torch.randn(64)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        logits = actor(obs)
        probs = torch.softmax(logits, dim=-1).to(logits.dtype)
        # healthy: probs = torch.softmax(logits.float(), dim=-1)
        action = torch.distributions.Categorical(probs=probs.float()).sample()
        entropy = -(probs * probs.log()).sum(-1)  # sick: PA201 module=-
        chosen = probs.float().gather(1, action[:, None]).clamp(min=1e-6).log().squeeze(1)
        loss = -(chosen * advantage).mean() - 0.01 * entropy.float().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
