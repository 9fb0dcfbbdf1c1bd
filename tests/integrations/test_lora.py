"""Adapters of PEFT over a base that stands still, in a loop of one's own, under TRL, and over 4-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import PolicyError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")
from preamp.integrations.transformers import attach  # noqa: E402

from .conftest import forget_accelerate  # noqa: E402
from .test_trl import datasets, given, llama, tokenizer, trl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
TARGETS = ["q_proj", "v_proj"]


def adapted(base: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))


def losses(model: Any, level: str, steps: int = 8) -> tuple[list[float], preamp.Session]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    session = preamp.prepare(model, optimizer, level=level)
    ids = torch.randint(3, 16, (4, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(steps):
        with session.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        session.backward(loss)
        session.step()
        session.zero_grad()
        found.append(loss.item())
    return found, session


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_frozen_base_costs_what_it_costs_alone(level: str, dtype: torch.dtype) -> None:
    base = llama().to(dtype)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    model = adapted(base)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    found, session = losses(model, level)
    assert found[-1] < found[0] - 0.05
    assert {p.dtype for p in frozen.values()} == {dtype}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    counted = session.memory().bytes_of("parameters") + session.memory().bytes_of("masters")
    of_adapters = (2 + 4 if level in ("O2", "O5") else 4) * trained
    assert counted == dtype.itemsize * sum(p.numel() for p in frozen.values()) + of_adapters
    assert not any("base_layer" in name or "embed" in name for name in session.state_dict()["masters"])
    session.close()
    assert all(torch.equal(p, before[name.removeprefix("base_model.model.").replace(".base_layer", "")])
               for name, p in frozen.items())  # fmt: skip
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_trl_with_adapters(tmp_path: Path, level: str) -> None:
    data = datasets.Dataset.from_dict({"text": ["to be or not to be", "that is the question"] * 8})
    arguments = trl.SFTConfig(**given(tmp_path, bf16=False, learning_rate=1e-2))
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    base = llama().to(torch.bfloat16)
    trainer = trl.SFTTrainer(base, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=config)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    attach(trainer, level)
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p.float(), start[name].float())}
    assert moved and all("lora_" in name for name in moved)
    forget_accelerate()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_adapters_over_weights_of_4_bits(level: str) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    base = llama().to(torch.bfloat16)
    for module in list(base.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                low = bnb.nn.Linear4bit(child.in_features, child.out_features, False, torch.bfloat16, quant_type="nf4")
                low.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, low.to("cpu"))
    model = adapted(base)
    found, session = losses(model, level)
    assert found[-1] < found[0] - 0.05
    session.close()
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16, torch.uint8}


def test_adapters_in_bfloat16_get_masters_or_are_refused() -> None:
    """As TRL makes them over a quantized base."""
    for level in ("O4", "O5"):
        model = adapted(llama().to(torch.bfloat16))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        if level == "O4":
            with pytest.raises(PolicyError, match="is bf16 and the policy wants fp32"):
                losses(model, level)
        else:
            found, session = losses(model, level)
            assert found[-1] < found[0] - 0.05 and len(session.state_dict()["masters"]) == 8
            session.close()
