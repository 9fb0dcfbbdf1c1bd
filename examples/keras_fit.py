"""Keras's model.fit at O4: which flights from New York arrive late?

    pip install "preamp[demo]" keras
    python examples/keras_fit.py

The model is written as for Keras alone. `attach(model, level)` is the only line of preamp.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch

from preamp.integrations.keras import attach
from preamp.zoo import TASKS
from preamp.zoo.flights import NUMERIC, auc, load

RECIPE = TASKS["flights"].recipe("ci")


def network(cardinalities: tuple[int, ...]) -> keras.Model:
    """Embeddings of carrier, airports and time, and a few layers."""
    codes, numbers = keras.Input((len(cardinalities),), dtype="int64"), keras.Input((len(NUMERIC),))
    parts = [keras.layers.Embedding(n, min(32, (n + 1) // 2))(codes[:, i]) for i, n in enumerate(cardinalities)]
    x = keras.layers.Concatenate()([*parts, numbers])
    for width in (256, 256):
        x = keras.layers.Dense(width, activation="relu")(x)
    return keras.Model([codes, numbers], keras.layers.Dense(1)(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O4")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    keras.utils.set_random_seed(0)
    flights = load()
    rows = (~flights.held_out).nonzero().flatten()
    rows = rows[torch.randperm(len(rows))[: given.steps * RECIPE.batch_size]]
    model = network(flights.cardinalities)
    rate = keras.optimizers.schedules.CosineDecay(10 * RECIPE.max_lr, given.steps)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=RECIPE.weight_decay, clipnorm=RECIPE.clip)
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    attached = attach(model, given.level)
    model.fit([flights.categories[rows], flights.numbers[rows]], flights.late[rows], RECIPE.batch_size)

    session = attached.session
    print(f"{session.steps} steps, {session.skipped} skipped, loss scale {session.loss_scale():g}")
    attached.close()
    held = flights.held_out
    logits = model.predict([flights.categories[held], flights.numbers[held]], RECIPE.eval_batch_size, verbose=0)
    print(f"AUC: {auc(torch.from_numpy(logits[:, 0]), flights.late[held]):.4f}")


if __name__ == "__main__":
    main()
