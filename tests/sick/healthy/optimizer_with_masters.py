"""A float16 model, and a user-written optimizer with float32 masters and a loss scale that starts far too high."""

import torch
from torch import nn


class MasteredAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, scale=2.0**19):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.scale, self.good = scale, 0

    @torch.no_grad()
    def step(self):
        live = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not all(p.grad.isfinite().all() for _, p in live):
            self.scale, self.good = self.scale / 2, 0
            return False
        for g, p in live:
            s = self.state[p]
            if not s:
                s.update(master=p.detach().float().clone(), t=0)
                s["m"], s["v"] = torch.zeros_like(s["master"]), torch.zeros_like(s["master"])
            s["t"] += 1
            b1, b2 = g["betas"]
            grad = p.grad.float() / self.scale
            s["m"].lerp_(grad, 1 - b1)
            s["v"].lerp_(grad * grad, 1 - b2)
            mhat, vhat = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
            s["master"].addcdiv_(mhat, vhat.sqrt() + g["eps"], value=-g["lr"])
            p.copy_(s["master"])
        self.good += 1
        if self.good % 200 == 0:
            self.scale *= 2
        return True


class Block(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main():
    torch.manual_seed(109)
    model = nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 8)).half()
    opt = MasteredAdam(model.parameters(), lr=5e-3)
    x = torch.randn(128, 16)
    y = x[:, :8].argmax(1)
    for step in range(12):
        idx = torch.randperm(128)[:64]
        loss = nn.functional.cross_entropy(model(x[idx].half()).float(), y[idx])
        opt.zero_grad()
        (loss * opt.scale).backward()
        done = opt.step()
        print(f"{step} loss {loss.item():.4f} scale {opt.scale:.0f} {'' if done else 'skipped'}")


if __name__ == "__main__":
    main()
