"""A training loop that logs the gradient norm between backward and the scaler's step: what it prints is scaled."""

import torch
from torch import nn

torch.manual_seed(15)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 8)
        self.decoder = nn.Linear(8, 32)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def grad_norm(model):
    squares = [p.grad.pow(2).sum() for p in model.parameters()]  # sick: PA106 module=-
    return torch.stack(squares).sum().sqrt().item()


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
x = torch.randn(64, 4) @ torch.randn(4, 32) * 0.5
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    norm = grad_norm(model)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f} norm {norm:.3f}")
