"""A float16 loss times a static scale of 2**16 is infinite before backward begins; functional style."""

import torch
import torch.nn.functional as F

SCALE = 2.0**16
torch.manual_seed(0)
params = {"w1": torch.randn(16, 32) * 0.2, "w2": torch.randn(32, 4) * 0.2}
master = {k: v.clone() for k, v in params.items()}


def forward(p, x):
    return torch.relu(x @ p["w1"]) @ p["w2"]


def step(master, x, y, lr=0.1):
    half = {k: v.half().requires_grad_() for k, v in master.items()}
    loss = F.cross_entropy(forward(half, x.half()), y)
    (loss * SCALE).backward()  # sick: PA201 module=-
    # healthy: (loss.float() * SCALE).backward()
    for k, h in half.items():
        g = h.grad.float() / SCALE
        if g.isfinite().all():
            master[k] -= lr * g
    return loss.item()


for _i in range(5):
    x = torch.randn(64, 16)
    loss = step(master, x, x[:, :4].argmax(1))
print(f"loss {loss:.4f}")
