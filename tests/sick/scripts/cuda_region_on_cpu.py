"""A script written for a GPU and run on a CPU: the region asks for the wrong device type and does nothing."""

import torch
from torch import nn

torch.manual_seed(22)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(32, 16, device=device), torch.randint(0, 8, (32,), device=device)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    with torch.autocast("cuda", dtype=torch.bfloat16):  # sick: PA109 module=-
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
