"""The click model on logits: binary_cross_entropy_with_logits on a float32 copy of the fp16 scores."""

import torch
from torch import nn

torch.manual_seed(2)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.trunk(x)))


model = ClickModel()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
x = torch.randn(32, 16)
clicks = (x[:, :8] > 0).float()
for epoch in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = criterion(logits.float(), clicks)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("epoch", epoch, "loss", loss.item())
