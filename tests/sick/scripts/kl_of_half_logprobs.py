"""Policy gradient with a KL penalty to a frozen reference; fp16."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(7)
V = 32


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.head = nn.Linear(64, V)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def logprobs(model, ids, actions):
    return F.log_softmax(model(ids), dim=-1).gather(-1, actions[..., None]).squeeze(-1)
    # healthy: return F.log_softmax(model(ids).float(), dim=-1).gather(-1, actions[..., None]).squeeze(-1)


def kl_penalty(policy, reference, clamp_value=20.0):
    r = (reference - policy).clamp(min=-clamp_value, max=clamp_value)
    # healthy: r = (reference - policy).clamp(min=-10.0, max=10.0)
    return torch.exp(r) - r - 1  # sick: PA201 module=-


policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False)
with torch.no_grad():
    reference.head.weight.mul_(6)
    policy.head.weight.mul_(6)
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=128.0)
for step in range(40):
    ids = torch.randint(0, V, (16, 8))
    actions = torch.randint(0, V, (16, 8))
    advantage = torch.where(actions < 4, 1.0, -1.0)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        new = logprobs(policy, ids, actions)
        with torch.no_grad():
            ref = logprobs(reference, ids, actions)
        loss = -(advantage * new).mean() + 1e-3 * kl_penalty(new, ref).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 4 == 3:
        print(step, round(loss.item(), 4), scaler.get_scale())
