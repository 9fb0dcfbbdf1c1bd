"""Evolution strategies without a backward pass: gradients written by hand, the population scored in bf16 by vmap."""

import argparse

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector


def unflatten(flat, like):
    out, i = {}, 0
    for n, p in like.items():
        out[n] = flat[i : i + p.numel()].view_as(p)
        i += p.numel()
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=12)
    ap.add_argument("--pairs", type=int, default=32)
    ap.add_argument("--sigma", type=float, default=0.05)
    args = ap.parse_args()
    torch.manual_seed(112)
    torch.set_grad_enabled(False)
    policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    policy.requires_grad_(False)
    names = dict(policy.named_parameters())
    opt = torch.optim.Adam(policy.parameters(), lr=0.03, weight_decay=1e-3)
    w = torch.randn(8, 8) / 3
    x = torch.randn(64, 8)

    def score(flat):
        out = functional_call(policy, unflatten(flat, names), (x,))
        return -(out.float() - torch.sin(x @ w)).square().mean()

    for gen in range(args.generations):
        theta = parameters_to_vector(policy.parameters())
        eps = torch.randn(args.pairs, theta.numel())
        eps = torch.cat([eps, -eps])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fitness = vmap(score)(theta + args.sigma * eps)
        rank = fitness.argsort().argsort().float() / (len(fitness) - 1) - 0.5
        estimate = unflatten(-(rank @ eps) / (len(eps) * args.sigma), names)
        for n, p in names.items():
            p.grad = estimate[n].clone()
        opt.step()
        print(f"{gen} loss {-fitness.mean().item():.4f} best {-fitness.max().item():.4f}")


if __name__ == "__main__":
    main()
