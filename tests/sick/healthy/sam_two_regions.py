"""SAM, two fp16 regions and two scaled backward passes a step, gradients unscaled by hand, skip by hand."""

import contextlib

import torch
from torch import nn

SCALE = 1024.0


@contextlib.contextmanager
def perturbed(params, rho):
    grads = [p.grad / SCALE for p in params]
    norm = torch.stack([g.norm() for g in grads]).norm().clamp_min(1e-8)
    shifts = [g * (rho / norm) for g in grads]
    with torch.no_grad():
        torch._foreach_add_(params, shifts)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_sub_(params, shifts)


def main():
    torch.manual_seed(103)
    x = torch.randn(96, 3, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0].mean((1, 2)) > 0).long()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
    )
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)

    def loss_of(idx):
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x[idx])
        return nn.functional.cross_entropy(out.float(), y[idx], label_smoothing=0.1)

    for step in range(8):
        idx = torch.randperm(96)[:32]
        opt.zero_grad()
        first = loss_of(idx)
        (first * SCALE).backward()
        with perturbed(params, 0.05):
            opt.zero_grad()
            momentum, net[1].momentum = net[1].momentum, 0.0
            second = loss_of(idx)
            net[1].momentum = momentum
            (second * SCALE).backward()
        for p in params:
            p.grad.div_(SCALE)
        if all(p.grad.isfinite().all() for p in params):
            opt.step()
        print(f"{step} {first.item():.4f} -> {second.item():.4f}")


if __name__ == "__main__":
    main()
