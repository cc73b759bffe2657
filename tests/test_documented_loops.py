"""Python that the documentation shows, taken from its pages and run: a loop that does not protect must not stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from private_setting import DATA, collate, plain_gradients
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import epsilon
from rasura.core.interfaces import InputError
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str) -> list[str]:
    """The fenced Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def names(size: int = 2) -> dict[str, Any]:
    """What a reader has at hand before the loop."""
    model = tiny("bert", "classification", num_labels=2)  # in eval mode, as from_pretrained gives models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, size, shuffle=True, collate_fn=collate)
    return {"rasura": rasura, "torch": torch, "model": model, "optimizer": optimizer, "loader": loader}


def test_the_page_has_a_loop_a_trainer_and_a_checkpoint() -> None:
    first, second, third, _ = blocks("docs/differential-privacy.md")
    assert "rasura.protect_training" in first and "PrivateTrainer" in second and "load_state_dict" in third


def test_the_documented_plan_in_a_fixed_order_has_its_epsilon_and_its_noise() -> None:
    here: dict[str, Any] = {}
    exec(blocks("docs/differential-privacy.md")[3], here)
    assert here["epsilon"] == pytest.approx(3.698, abs=1e-3) and here["released"].shape == (1000,)
    assert 2.5 < float(here["released"].std()) < 3.5, "the first step has the noise multiplier times the clip"


def test_the_documented_loop_protects_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = names()
    taken = []
    step = here["optimizer"].step

    def watched() -> None:
        taken.append({n: p.grad.clone() for n, p in here["model"].named_parameters()})
        step()

    monkeypatch.setattr(here["optimizer"], "step", watched)
    exec(blocks("docs/differential-privacy.md")[0], here)
    ledger = here["ledger"]
    assert ledger.releases == len(taken) == 36
    assert ledger.epsilon == pytest.approx(epsilon(1.0, 2 / 24, 36, 0.1 / 24))
    planned, counted = capsys.readouterr().out.splitlines()
    assert "planned, for 3 epochs (36 releases)" in planned and "counted, after 36 releases" in counted
    # The noise of every step has the width that is stated: 1 over two texts.
    for one in (taken[0], taken[-1]):
        whole = torch.cat([g.reshape(-1) for g in one.values()])
        assert float(whole.std()) == pytest.approx(0.5, rel=0.02)
    with pytest.raises(InputError, match="all 36 planned releases"):
        exec(re.sub(r"^model, .*\n", "", blocks("docs/differential-privacy.md")[0]), here)


def test_the_documented_gradient_is_not_the_plain_one() -> None:
    here = names(12)
    exec(blocks("docs/differential-privacy.md")[0].splitlines()[0], here)
    batch = next(iter(here["loader"]))
    plain = plain_gradients(batch)
    here["model"](**batch).loss.backward()
    found = {n: p.grad for n, p in here["model"].named_parameters()}
    apart = [(found[n] - gradient).reshape(-1) for n, gradient in plain.items()]
    # Noise of one over twelve texts; what clipping takes away is small beside it.
    assert float(torch.cat(apart).std()) == pytest.approx(1 / 12, rel=0.05)
    assert not any(torch.equal(found[n], gradient) for n, gradient in plain.items())


@pytest.mark.parametrize(
    "line",
    [
        'model.bert(input_ids=batch["input_ids"]).last_hidden_state.sum().backward()',
        '(model(**batch).loss + model.bert(input_ids=batch["input_ids"]).last_hidden_state.sum()).backward()',
        "[setattr(p, 'grad', torch.ones_like(p)) for p in model.parameters()]",
        "model.__class__.__mro__[1].forward(model, **batch).loss.backward()",
    ],
)
def test_a_bypass_in_the_documented_loop_raises(line: str) -> None:
    here = names(12)
    loop = blocks("docs/differential-privacy.md")[0].replace("model(**batch).loss.backward()", line)
    assert line in loop
    with pytest.raises(InputError, match=r"but not through|does not come from a protected"):
        exec(loop, here)


@pytest.mark.slow
def test_the_documented_checkpoint_goes_on_counting() -> None:
    loop, _, checkpoint, _ = blocks("docs/differential-privacy.md")
    here = names()
    exec(loop, here)
    again = {**names(), "ledger": here["ledger"]}
    exec(checkpoint, again)
    assert again["ledger"] is not here["ledger"] and again["ledger"].releases == 36
    exec(re.sub(r"^model, .*\n", "", loop), again)
    assert again["ledger"].releases == 72
    with pytest.raises(InputError, match="all 72 planned releases"):
        exec(re.sub(r"^model, .*\n", "", loop), again)


@pytest.mark.slow
def test_the_documented_trainer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=6, num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    here = {**names(), "arguments": arguments, "data": DATA, "collate": collate}
    exec(blocks("docs/differential-privacy.md")[1], here)
    assert here["trainer"].ledger.releases == 4 and "counted, after 4 releases" in capsys.readouterr().out


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("README.md")
    exec(code, {})
    assert (tmp_path / "update.safetensors").exists()
