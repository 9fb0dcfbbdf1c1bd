"""A hand-written normalise function whose backward divides by the input's length, which empty rows make zero."""

import torch
from torch import nn

torch.manual_seed(47)


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=-1, keepdim=True)
        out = x / length.clamp(min=1e-6)
        ctx.save_for_backward(out, length)
        return out

    @staticmethod
    def backward(ctx, grad):
        out, length = ctx.saved_tensors
        return (grad - out * (grad * out).sum(dim=-1, keepdim=True)) / length


class Direction(nn.Module):
    def forward(self, x):
        return Normalise.apply(x)  # sick: PA201 module=encoder.direction


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8, bias=False)
        self.direction = Direction()

    def forward(self, x):
        return self.direction(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x, y = torch.randn(16, 16), torch.randint(0, 8, (16,))
x[5] = 0.0
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(5):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
