"""A click model that ends in a sigmoid and applies BCELoss to its 16-bit probabilities (pytorch#61098)."""

import torch
from torch import nn

torch.manual_seed(3)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return torch.sigmoid(self.head(torch.relu(self.trunk(x))))
        # healthy: return self.head(torch.relu(self.trunk(x)))


model = ClickModel()
criterion = nn.BCELoss()
# healthy: criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
x = torch.randn(32, 16)
clicks = (x[:, :8] + 0.1 * torch.randn(32, 8) > 0).float()

for epoch in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        prob = model(x)
        # healthy: logits = model(x)
    loss = criterion(prob, clicks.to(prob.dtype))  # sick: PA102 module=-
    # healthy: loss = criterion(logits.float(), clicks)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("epoch", epoch, "loss", loss.item())
