"""HF Trainer under `attach` trains as a plain loop with a session, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from preamp.errors import PolicyError, SessionError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from preamp.integrations.transformers import attach  # noqa: E402

from .conftest import forget_accelerate  # noqa: E402
from .loops import CASES as EVERY_CASE  # noqa: E402
from .loops import CLIP, MAKERS, MICRO, STEPS, data, network, plain, schedule_of  # noqa: E402

CASES = [case for case in EVERY_CASE if case[0] != "O3"]  # where the model's own loss reads 16-bit labels
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x).float()
        return {"loss": nn.functional.mse_loss(out, labels.float()), "logits": out}


def rows() -> list[dict[str, Tensor]]:
    return [{"x": one, "labels": other} for x, y in data() for one, other in zip(x, y, strict=True)]


class Stream(IterableDataset[Any]):
    """The rows in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def trainer_of(model: nn.Module, kind: str, folder: Path, given: Any, steps: int = STEPS, **more: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=MICRO,
        max_grad_norm=CLIP, logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, **{"save_strategy": "no", **more},
    )  # fmt: skip
    optimizer = MAKERS[kind](model.parameters())
    schedule = schedule_of(optimizer)
    return Trainer(
        model, arguments, train_dataset=given, eval_dataset=sentences()[:16], optimizers=(optimizer, schedule)
    )


class Rates(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """The learning rate after each step, and the session's state at the end."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.state: dict[str, Any] = {}
        self.attached: Any = None

    def on_step_end(self, _: Any, state: Any, control: Any, optimizer: Any = None, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.state = copy.deepcopy(self.attached.session.state_dict())


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_its_loop_is_a_session_loop(level: str, kind: str, tmp_path: Path) -> None:
    model, seen = Network(), Rates()
    trainer = trainer_of(model, kind, tmp_path, Stream())
    trainer.add_callback(seen)
    seen.attached = attach(trainer, level)
    trainer.train()
    state, parameters, rates, _ = plain(level, kind, low=("O2", "O5"))
    named = zip(model.net.named_parameters(), parameters, strict=True)
    assert all(torch.equal(mine, state["masters"].get(name, its)) for (name, mine), its in named)
    masters = {name.removeprefix("net."): value for name, value in seen.state["masters"].items()}
    torch.testing.assert_close(masters, state["masters"], rtol=0, atol=0)
    assert {**seen.state, "masters": 0} == {**state, "masters": 0} and seen.rates == rates
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logged] == [0] + [1] * 5
    assert all(entry["loss_scale"] > 0 for entry in logged)
    assert "forward" not in vars(model) and {p.dtype for p in model.parameters()} == {torch.float32}


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": torch.randint(50, (12,), generator=generator), "labels": torch.tensor(i % 2)} for i in range(240)
    ]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_bert_resumes_bit_for_bit_and_is_saved_in_float32(level: str, tmp_path: Path) -> None:
    def trained(folder: Path, resume: Path | None) -> Any:
        forget_accelerate()
        trainer = trainer_of(bert(), "preamp", folder, sentences(), 12, save_strategy="steps", save_steps=4)
        attach(trainer, level)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = trained(tmp_path / "whole", None)
    resumed = trained(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-4")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.state.log_history[-2]["loss"] == resumed.state.log_history[-2]["loss"]
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "whole" / "checkpoint-12", dtype="auto")
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), whole.model.parameters(), strict=True))
    whole.evaluate(sentences()[:8])  # prepares a loader, and no session
    assert "forward" not in vars(whole.model) and whole.accelerator.scaler is None
    whole.save_model(str(tmp_path / "final"))
    final = BertForSequenceClassification.from_pretrained(tmp_path / "final", dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(final.parameters(), whole.model.parameters(), strict=True))
    again = whole.train()  # a second training makes a second session
    assert again.global_step == 12


def test_what_it_refuses(tmp_path: Path) -> None:
    trainer = trainer_of(Network(), "preamp", tmp_path, Stream())
    with pytest.raises(PolicyError, match="there is no level 'bf16'"):
        attach(trainer, "bf16")
    attach(trainer, "Auto")
    with pytest.raises(SessionError, match="takes a Trainer; this is"):
        attach(nn.Linear(2, 2), "O5")
    low = trainer_of(Network(), "preamp", tmp_path, Stream(), bf16=True)
    with pytest.raises(SessionError, match=r"TrainingArguments\(bf16=True\) casts by itself"):
        attach(low, "O5")
    rounded = trainer_of(bert().bfloat16(), "preamp", tmp_path, sentences(), 8)
    attach(rounded, "O5")
    with pytest.raises(PolicyError, match=r"is bf16 and .* with from_pretrained\(..., dtype=torch.float32\)"):
        rounded.train()
