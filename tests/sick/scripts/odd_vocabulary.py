"""A small language model in bf16 with a vocabulary of 1021 words: the output layer dominates and is not padded."""

import torch
from torch import nn

VOCAB = 1021


class LanguageModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.block = nn.Sequential(nn.Linear(dim, dim), nn.GELU())
        self.lm_head = nn.Linear(dim, VOCAB)  # sick: PA105 module=lm_head line=any

    def forward(self, tokens):
        return self.lm_head(self.block(self.embed(tokens)))


def main():
    torch.manual_seed(12)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, VOCAB, (4, 17))
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
