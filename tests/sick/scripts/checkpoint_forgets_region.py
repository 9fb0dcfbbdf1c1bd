"""A hand-written checkpoint function that recomputes outside the region, in float32 (pytorch#141896)."""

import torch
from torch import nn

torch.manual_seed(30)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)  # sick: PA112 module=encoder.block line=any
        params = tuple(ctx.block.parameters())
        return None, *torch.autograd.grad(out, (x, *params), grad.to(out.dtype))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x):
        return Recompute.apply(self.block, self.stem(x).float(), *self.block.parameters())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
