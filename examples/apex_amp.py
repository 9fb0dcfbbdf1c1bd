"""A script of 2019, as it was: which flights from New York arrive late?

    pip install "preamp[demo]"
    preamp run examples/apex_amp.py             # apex can be imported in it
    preamp migrate examples/apex_amp.py         # the diff to run it without (pip install "preamp[migrate]")

Nothing in it is of preamp but the data.
"""

from __future__ import annotations

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam

from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = TASK.build("ci", seed=0).to(device)
    optimizer = FusedAdam(model.parameters(), lr=RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")

    for step, (inputs, late) in enumerate(TASK.batches("ci", seed=0, steps=args.steps, batch_size=RECIPE.batch_size)):
        loss = TASK.loss(model(*(one.to(device) for one in inputs)), late.to(device))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), RECIPE.clip)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, "flights.pt"
    )
    model.eval()
    print(f"{TASK.metric}: {TASK.evaluate(model, 'ci', device=device):.4f}")


if __name__ == "__main__":
    main()
