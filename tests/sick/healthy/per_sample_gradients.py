"""DP-SGD by torch.func (functional_call, grad, vmap): per-sample clipping, noise, and gradients put in by hand."""

import argparse

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--sigma", type=float, default=0.3)
    args = ap.parse_args()
    torch.manual_seed(104)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    buffers = dict(model.named_buffers())
    x = torch.randn(256, 16)
    y = x[:, :8].argmax(1)

    def loss_one(params, xi, yi):
        out = functional_call(model, (params, buffers), (xi[None],))
        return nn.functional.cross_entropy(out.float(), yi[None])

    per_sample = vmap(grad_and_value(loss_one), in_dims=(None, 0, 0))
    for step in range(args.steps):
        idx = torch.randperm(256)[:64]
        params = {k: v.detach() for k, v in model.named_parameters()}
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            grads, losses = per_sample(params, x[idx], y[idx])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (args.clip / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            g = torch.einsum("b...,b->...", grads[name], factor)
            p.grad = (g + args.sigma * args.clip * torch.randn_like(g)) / len(idx)
        opt.step()
        opt.zero_grad()
        print(f"{step} loss {losses.mean().item():.4f} clipped {(factor < 1).float().mean().item():.0%}")


if __name__ == "__main__":
    main()
