"""fastai's tabular learner at O5: which flights from New York arrive late?

    pip install "preamp[demo]" fastai
    python examples/fastai_tabular.py

The learner is made as for fastai alone. `to_preamp(level)` is the only line of preamp.
"""

from __future__ import annotations

import argparse

import torch
from fastai.tabular.all import Categorify, CategoryBlock, TabularDataLoaders, accuracy, pd, tabular_learner

import preamp.integrations.fastai  # noqa: F401 - gives learners their to_preamp
from preamp.zoo import TASKS
from preamp.zoo.flights import CATEGORICAL, NUMERIC, auc, load

RECIPE = TASKS["flights"].recipe("ci")


def table(rows: int) -> pd.DataFrame:
    """Flights of most days to learn from, in random order, and all those of the days held out."""
    flights = load()
    training = (~flights.held_out).nonzero().flatten()
    chosen = training[torch.randperm(len(training), generator=torch.Generator().manual_seed(0))[:rows]]
    chosen = torch.cat([chosen, flights.held_out.nonzero().flatten()])
    frame = pd.DataFrame(flights.numbers[chosen].numpy(), columns=list(NUMERIC))
    for name, codes in zip(CATEGORICAL, flights.categories[chosen].unbind(1), strict=True):
        frame[name] = pd.Categorical(codes.numpy())
    return frame.assign(late=flights.late[chosen].int().numpy(), held_out=flights.held_out[chosen].numpy())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    frame = table(given.steps * RECIPE.batch_size)
    torch.manual_seed(0)
    loaders = TabularDataLoaders.from_df(
        frame,
        procs=[Categorify],
        cat_names=list(CATEGORICAL),
        cont_names=list(NUMERIC),
        y_names="late",
        y_block=CategoryBlock(),
        valid_idx=frame.index[frame.held_out].tolist(),
        bs=RECIPE.batch_size,
    )
    learn = tabular_learner(loaders, layers=[256, 256], metrics=accuracy, wd=RECIPE.weight_decay)
    learn.to_preamp(given.level)
    learn.fit_one_cycle(1, 10 * RECIPE.max_lr)

    chances, late = learn.get_preds()
    print(f"AUC: {auc(chances[:, 1], late.flatten()):.4f}")


if __name__ == "__main__":
    main()
