"""What holds for every task: seeds, sizes, training, evaluation, low precision."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from preamp.zoo import TASKS, Recipe, Task
from preamp.zoo.bert import SHAPES as BERT_SHAPES
from preamp.zoo.bert import Bert
from preamp.zoo.seresnext import SHAPES as SERESNEXT_SHAPES
from preamp.zoo.seresnext import SEResNeXt
from preamp.zoo.task import shuffled
from preamp.zoo.unet import UNet

CPU, FULL = torch.device("cpu"), SERESNEXT_SHAPES["full"]


@pytest.fixture(params=sorted(TASKS))
def task(request) -> Task:
    return TASKS[request.param]


def first_batch(task, *, seed, size="ci", batch_size=4):
    return next(task.batches(size, seed=seed, steps=1, batch_size=batch_size))


def flat(batch):
    inputs, target = batch
    return [*inputs, target]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def losses(task, *, seed, steps, batch_size):
    recipe = task.recipe("ci")
    model = task.build("ci", seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.max_lr / 4, weight_decay=recipe.weight_decay)
    seen = []
    for inputs, target in task.batches("ci", seed=seed, steps=steps, batch_size=batch_size):
        loss = task.loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_quick_recipe_differs_in_steps_alone(task):
    for size in task.sizes:
        usual, quick = task.recipe(size), task.recipe(size, quick=True)
        assert isinstance(usual, Recipe)
        assert quick.steps < usual.steps
        assert {**vars(quick), "steps": usual.steps} == vars(usual)
        assert usual.optimizer in ("AdamW", "SGD")


def test_an_unknown_size_names_the_known_ones(task):
    calls = (
        lambda: task.recipe("huge"),
        lambda: task.build("huge", seed=0),
        lambda: task.batches("huge", seed=0, steps=1, batch_size=1),
        lambda: task.evaluate(lambda *x: x[0], "huge", device=CPU),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"'huge'.*ci, full"):
            call()


def test_weights_depend_on_the_seed_alone(task):
    first = task.build("ci", seed=3).state_dict()
    torch.rand(7)
    again, other = task.build("ci", seed=3).state_dict(), task.build("ci", seed=4).state_dict()
    assert same(first.values(), again.values())
    assert not same(first.values(), other.values())
    assert all(tensor.dtype == torch.float32 for tensor in first.values() if tensor.is_floating_point())


def test_batches_depend_on_the_seed_alone(task):
    assert same(flat(first_batch(task, seed=3)), flat(first_batch(task, seed=3)))
    assert not same(flat(first_batch(task, seed=3)), flat(first_batch(task, seed=4)))


def test_batches_have_the_length_asked_for(task):
    batches = list(task.batches("ci", seed=0, steps=3, batch_size=5))
    assert len(batches) == 3
    assert {tensor.shape[0] for batch in batches for tensor in flat(batch)} == {5}


@pytest.mark.slow
def test_torchs_generator_is_left_as_found(task):
    before = torch.get_rng_state()
    model = task.build("ci", seed=0).eval()
    first_batch(task, seed=0)
    task.evaluate(model, "ci", device=CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_repeats_bit_for_bit(task):
    assert losses(task, seed=2, steps=3, batch_size=8) == losses(task, seed=2, steps=3, batch_size=8)


def test_a_few_steps_lower_the_loss(task):
    seen = losses(task, seed=0, steps=24, batch_size=256 if task.name == "flights" else 16)
    assert sum(seen[-4:]) < 0.95 * sum(seen[:4]), seen


@pytest.mark.slow
def test_evaluation_is_a_share_and_repeats(task):
    model = task.build("ci", seed=0).eval()
    quality = task.evaluate(model, "ci", device=CPU)
    assert 0.0 <= quality <= 1.0
    assert task.evaluate(model, "ci", device=CPU) == quality


@pytest.mark.slow
def test_evaluation_survives_outputs_that_are_not_finite(task):
    model = task.build("ci", seed=0).eval()
    quality = task.evaluate(lambda *inputs: model(*inputs) * float("nan"), "ci", device=CPU)
    assert 0.0 <= quality <= 0.5


def test_evaluation_records_no_graph(task):
    model, flags = task.build("ci", seed=0).eval(), []

    def predict(*inputs):
        output = model(*inputs)
        flags.append(output.requires_grad)
        return output

    task.evaluate(predict, "ci", device=CPU)
    assert flags
    assert not any(flags)


def test_bfloat16_autocast_gives_finite_gradients(task):
    model = task.build("ci", seed=0)
    inputs, target = first_batch(task, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.loss(model(*inputs), target)
    loss.backward()
    assert loss.dim() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_loss_takes_a_low_precision_output(task):
    inputs, target = first_batch(task, seed=0)
    output = task.build("ci", seed=0)(*inputs)
    exact, rounded = task.loss(output, target), task.loss(output.bfloat16(), target)
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)


@pytest.mark.parametrize(
    "make, millions, tolerance",
    [
        (lambda: UNet(channels=3, base=32, levels=5), 7.70, 0.1),
        (lambda: SEResNeXt(FULL), 27.56, 0.01),  # the published network
        (lambda: SEResNeXt(replace(FULL, width=64, first=64, expansion=4, groups=1, gated=False)), 25.557, 0.001),
        (lambda: Bert(BERT_SHAPES["full"]), 109.5, 0.5),
        (lambda: SEResNeXt(SERESNEXT_SHAPES["ci"]), 0.147, 0.04),
    ],
    ids=["unet", "seresnext", "resnet", "bert", "seresnext-ci"],
)
def test_parameter_counts(make, millions, tolerance):
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make().parameters())
    assert count / 1e6 == pytest.approx(millions, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "bert", "seresnext"])
def test_full_size_fits_its_inputs(name):
    task = TASKS[name]
    inputs, target = first_batch(task, seed=0, size="full", batch_size=2)
    with torch.device("meta"):
        model = task.build("full", seed=0)
        loss = task.loss(model(*(x.to("meta") for x in inputs)), target.to("meta"))
    assert loss.dim() == 0


def test_shuffled_walks_through_all_before_repeating():
    generator = torch.Generator().manual_seed(0)
    batches = list(shuffled(10, 3, 7, generator))
    assert [len(batch) for batch in batches] == [3] * 7
    for epoch in (batches[:3], batches[3:6]):
        assert len(set(itertools.chain.from_iterable(batch.tolist() for batch in epoch))) == 9


def test_shuffled_refuses_a_batch_larger_than_the_data():
    with pytest.raises(ValueError, match="11"):
        next(shuffled(10, 11, 1, torch.Generator()))
