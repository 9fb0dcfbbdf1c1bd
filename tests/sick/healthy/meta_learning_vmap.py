"""MAML by torch.func: models run inside vmap and grad, where tensors are not tensors."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)


def inner(params, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.mse_loss(functional_call(model, params, (x,)).float(), y)


def outer(params, xs, ys, xq, yq):
    g = grad(inner)(params, xs, ys)
    return inner({k: p - 0.05 * g[k] for k, p in params.items()}, xq, yq)


for step in range(6):
    amp = torch.rand(4, 1, 1) + 0.5
    x = torch.randn(4, 10, 1)
    y = amp * x.sin()
    loss = vmap(outer, in_dims=(None, 0, 0, 0, 0))(
        dict(model.named_parameters()), x[:, :5], y[:, :5], x[:, 5:], y[:, 5:]
    ).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
