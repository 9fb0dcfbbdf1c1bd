"""A student-teacher pair where the teacher is cast by hand inside a region that would have cast it anyway."""

import torch
from torch import nn

torch.manual_seed(26)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.encoder(x))))


teacher, student = Net().requires_grad_(False), Net()
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x = torch.randn(32, 16)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        target = teacher.half()(x)  # sick: PA110 module=-
        loss = nn.functional.mse_loss(student(x), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
