"""bf16 weights, Adam with stochastic rounding and weight decay."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(4)


def add_stochastic_(target, update):
    result = target.float() + update
    if target.dtype == torch.float32:
        target.copy_(result)
        return
    bits = result.view(torch.int32) + torch.randint_like(result, 1 << 16, dtype=torch.int32)
    target.copy_(bits.bitwise_and(-65536).view(torch.float32))


class AdamWSR(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(
                        n=0, m=torch.zeros_like(p, dtype=torch.float32), v=torch.zeros_like(p, dtype=torch.float32)
                    )
                s["n"] += 1
                g = p.grad.float()
                s["m"].lerp_(g, 1 - b1)
                s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])  # sick: PA204 module=.
                # healthy:
                m, v = s["m"] / (1 - b1 ** s["n"]), s["v"] / (1 - b2 ** s["n"])
                add_stochastic_(p, -group["lr"] * m / (v.sqrt() + group["eps"]))
                # healthy: decayed = group["weight_decay"] * p.float()
                # healthy: add_stochastic_(p, -group["lr"] * (m / (v.sqrt() + group["eps"]) + decayed))


model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)
with torch.no_grad():
    model[0].weight.mul_(10)
optimizer = AdamWSR(model.parameters(), lr=1e-3, weight_decay=0.5)
first = model[0].weight.float().norm().item()
for step in range(600):
    x = torch.randn(32, 32)
    y = x[:, :8].argmax(1)
    loss = F.cross_entropy(model(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(step, round(loss.item(), 4), "norm", round(model[0].weight.float().norm().item() / first, 4))
