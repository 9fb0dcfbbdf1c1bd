"""An LSTM regressor whose gradients are clamped by tensor hooks, while they still carry the loss scale."""

import torch
import torch.nn as nn

CLIP = 0.25


class Cell(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.gates = nn.Linear(features + hidden, 4 * hidden)

    def forward(self, x, h, c):
        i, f, g, o = self.gates(torch.cat([x, h], -1)).float().chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Forecaster(nn.Module):
    def __init__(self, features=4, hidden=32):
        super().__init__()
        self.cell, self.out = Cell(features, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), self.out.in_features)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], h, c)
        return self.out(h).squeeze(-1)


def fit(model, series, target, epochs=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-CLIP, CLIP))  # sick: PA106 module=-
    for epoch in range(epochs):
        total = 0.0
        for x, y in zip(series.split(16), target.split(16), strict=False):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                pred = model(x)
            loss = nn.functional.smooth_l1_loss(pred.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch}: {total:.6f}")


if __name__ == "__main__":
    torch.manual_seed(12)
    t = torch.rand(64, 1) * 6
    series = torch.sin(t + torch.arange(20) / 3).unsqueeze(-1).repeat(1, 1, 4)
    fit(Forecaster(), series, torch.sin(t.squeeze(1) + 7))
