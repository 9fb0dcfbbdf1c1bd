"""Apex at O2, two models and three losses, clipped as its documents say."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(6)
G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
og, od = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
(G, D), (og, od) = amp.initialize([G, D], [og, od], opt_level="O2", num_losses=3, verbosity=0)
bce = nn.BCEWithLogitsLoss()
for step in range(6):
    real = torch.randn(16, 16)
    fake = G(torch.randn(16, 8))
    od.zero_grad()
    with amp.scale_loss(bce(D(real), torch.ones(16, 1)), od, loss_id=0) as s:
        s.backward()
    with amp.scale_loss(bce(D(fake.detach()), torch.zeros(16, 1)), od, loss_id=1) as s:
        s.backward()
    nn.utils.clip_grad_norm_(amp.master_params(od), 1.0)
    od.step()
    og.zero_grad()
    lg = bce(D(fake), torch.ones(16, 1))
    with amp.scale_loss(lg, og, loss_id=2) as s:
        s.backward()
    nn.utils.clip_grad_norm_(amp.master_params(og), 1.0)
    og.step()
    print(step, lg.item())
