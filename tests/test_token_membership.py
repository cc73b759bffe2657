"""Membership in the training of a causal model: each attack against loops over single logits, and the run on an adapter."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audit_setting import NAMES, causal_folder, model_folder
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from rasura import registry
from rasura.cli import app
from rasura.core.answers import Answers, Membership, ModelObservation, TokenAnswers
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import MODEL_USER, observe_model
from rasura.core.values import Grant, NotGranted
from rasura.metrics.membership import auc
from rasura.report.page import write_report
from rasura.runs.membership import MembershipAudit, infer_membership
from rasura.runs.membership_models import QueriedModels
from rasura.runs.membership_plan import MembershipPlan
from rasura.testing.tiny import CLS, PAD, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.outputs import answers

__all__ = ["causal_folder", "model_folder"]

CAUSAL = [name for name in registry.usual_membership("causal") if name != "blind"]
OF_TOKENS = [name for name in CAUSAL if name != "loss"]


def texts(count: int = 12, seed: int = 0) -> tuple[Batch, ...]:
    """Causal texts of two to 48 tokens."""
    rng = generator(seed, "texts")
    lengths = [2, 3, 48, *torch.randint(4, 20, (count - 3,), generator=rng).tolist()]
    return tuple(
        batch_of([[CLS, *torch.randint(11, 300, (n - 1,), generator=rng).tolist()]], "causal") for n in lengths[:count]
    )


def model(seed: int) -> Any:
    return tiny("gpt2", "causal", seed=seed).double()


def seen_of(rows: tuple[Batch, ...], reference: tuple[Batch, ...] = ()) -> ModelObservation:
    audited, before = model(0), model(1)
    return observe_model(
        MODEL_USER, "causal", candidates=rows, reference=reference,
        ask=lambda some: answers(audited, some, PAD, tokens=True),
        ask_reference=lambda some: answers(before, some, PAD, tokens=True),
    )  # fmt: skip


def guess(name: str, seen: ModelObservation) -> Membership:
    return registry.membership_attack(name)(seen, rng=generator(0, "attack"))


def slow(row: Batch, seed: int) -> list[tuple[float, float, bool]]:
    """Of each predicted token: log probability, the same standardised, whether it is the first choice; by single sums."""
    return of_ids(row.ids(0), seed)


@cache
def of_ids(ids: tuple[int, ...], seed: int) -> list[tuple[float, float, bool]]:
    with torch.no_grad():
        logits = model(seed)(input_ids=torch.tensor([ids])).logits[0].tolist()
    found = []
    for place, token in enumerate(ids[1:]):
        whole = math.log(sum(math.exp(x) for x in logits[place]))
        logs = [x - whole for x in logits[place]]
        mean = sum(math.exp(x) * x for x in logs)
        spread = math.sqrt(sum(math.exp(x) * (x - mean) ** 2 for x in logs))
        found.append((logs[token], (logs[token] - mean) / spread, max(logs) == logs[token]))
    return found


def expected(name: str, row: Batch, everyone: Sequence[Batch]) -> float:
    said, before = slow(row, 0), slow(row, 1)
    loss, old = (-sum(x[0] for x in some) / len(some) for some in (said, before))
    gains = [a[0] - b[0] for a, b in zip(said, before)]
    if name == "loss":
        return -loss
    if name == "zlib":
        return -loss / len(zlib.compress(row.seen[0].encode()))
    if name == "reference-loss":
        return old - loss
    if name in ("min-k", "min-k++"):
        lowest = sorted(x[1 if name == "min-k++" else 0] for x in said)[: max(1, len(said) // 5)]
        return sum(lowest) / len(lowest)
    if name == "ez-mia":
        errors = [g for g, one in zip(gains, said) if not one[2]]
        up, down = sum(g for g in errors if g > 0), -sum(g for g in errors if g < 0)
        return up / (up + down) if len(errors) > 1 else 0.5
    if name == "wbc":
        sizes = [w for w in (2, 3, 4, 5, 8, 11, 15, 21, 29, 40) if w <= len(gains)] or [len(gains)]
        votes = [[sum(gains[k : k + w]) > 0 for k in range(len(gains) - w + 1)] for w in sizes]
        return sum(sum(v) / len(v) for v in votes) / len(votes)

    def ratio(one: Batch) -> float:
        now, then = (math.exp(sum(x[0] for x in slow(one, s)) / len(slow(one, s))) for s in (0, 1))
        return now / ((1.3 * then + 0.7) / 2)

    assert name == "rmia-1"
    return sum(ratio(row) >= ratio(z) * (1 - 1e-12) for z in everyone) / len(everyone)


@pytest.mark.parametrize("name", CAUSAL)
def test_each_attack_is_its_formula(name: str) -> None:
    rows, others = texts(5), texts(4, seed=9)
    for reference in ((), others) if name == "rmia-1" else ((),):
        scores = guess(name, seen_of(rows, reference)).scores
        wanted = [expected(name, row, reference or rows) for row in rows]
        assert scores.dtype == torch.float64 and scores.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_windows_are_those_of_the_paper() -> None:
    from rasura.attacks.membership.tokens import WINDOWS

    assert WINDOWS == (2, 3, 4, 5, 8, 11, 15, 21, 29, 40)


@pytest.mark.parametrize("name", CAUSAL)
def test_an_attack_reads_only_what_it_declares(name: str) -> None:
    seen = seen_of(texts(5), texts(5, seed=9))
    attack = registry.membership_attack(name)
    assert attack.name == name
    for grants in (attack.needs, attack.needs | attack.uses):
        assert guess(name, ModelObservation("causal", {g: seen.granted[g] for g in grants})).scores.shape == (5,)
    for grant in attack.needs:
        with pytest.raises(NotGranted):
            guess(name, ModelObservation("causal", {g: v for g, v in seen.granted.items() if g is not grant}))


def answered(logs: list[list[float]], first: bool = False) -> Answers:
    """Answers with these log probabilities of tokens, none or all of them the first choice."""
    each = tuple(
        TokenAnswers(
            torch.tensor(x, dtype=torch.float64), torch.tensor(x, dtype=torch.float64), torch.full((len(x),), first)
        )
        for x in logs
    )
    losses = torch.tensor([-sum(x) / len(x) for x in logs], dtype=torch.float64)
    return Answers(losses, losses, torch.empty(len(logs), 0), each)


def compared(now: Answers, before: Answers) -> ModelObservation:
    rows = texts(len(now.losses))
    return observe_model(MODEL_USER, "causal", candidates=rows, ask=lambda _: now, ask_reference=lambda _: before)


def test_ez_mia_says_nothing_without_errors_and_is_finite_without_a_fall() -> None:
    before = answered([[-3.0, -3.0, -3.0]] * 3)
    now = answered([[-2.0, -1.0, -3.0], [-4.0, -5.0, -6.0], [-3.0, -3.0, -3.0]])
    assert guess("ez-mia", compared(now, before)).scores.tolist() == [1.0, 0.0, 0.5]
    right = answered([[-0.1, -0.1, -0.1]] * 3, first=True)
    assert guess("ez-mia", compared(right, before)).scores.tolist() == [0.5] * 3
    one = answered([[-1.0]] * 3)
    assert guess("ez-mia", compared(one, answered([[-3.0]] * 3))).scores.tolist() == [0.5] * 3, "a single error is too few"


@pytest.mark.parametrize("name", ["reference-loss", "ez-mia", "wbc"])
def test_a_text_that_became_likelier_everywhere_stands_first(name: str) -> None:
    rng = generator(3, "members")
    before = [torch.randn(30, generator=rng, dtype=torch.float64).sub(4).tolist() for _ in range(40)]
    noise = [torch.randn(30, generator=rng, dtype=torch.float64) for _ in range(40)]
    now = [(torch.tensor(b) + n + (0.8 if k < 20 else 0.0)).tolist() for k, (b, n) in enumerate(zip(before, noise))]
    scores = guess(name, compared(answered(now), answered(before))).scores.tolist()
    assert auc(scores, [k < 20 for k in range(40)]).mean > 0.95


@pytest.mark.parametrize("name", [n for n in OF_TOKENS if n not in ("zlib", "reference-loss", "rmia-1")])
def test_a_model_that_does_not_answer_token_by_token_is_said(name: str) -> None:
    bare = Answers(torch.zeros(3).double(), torch.zeros(3).double(), torch.empty(3, 2))
    with pytest.raises(NotApplicable, match="expected a causal model"):
        guess(name, compared(bare, bare))


def test_answers_do_not_depend_on_what_stands_beside_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from rasura.victims import outputs

    rows, own = texts(9), model(0)
    alone = [answers(own, [row], PAD, tokens=True) for row in rows]
    for limit in (1 << 26, 1 << 15):
        monkeypatch.setattr(outputs, "LOGITS", limit)
        together = answers(own, rows, PAD, tokens=True)
        assert together.losses.tolist() == pytest.approx([float(one.losses[0]) for one in alone], rel=1e-12)
        for one, both in zip(alone, together.tokens, strict=True):
            assert torch.allclose(one.tokens[0].standard, both.standard, rtol=1e-9)
            assert torch.equal(one.tokens[0].first, both.first)
    assert answers(own, rows, PAD).tokens == ()


# --- the run


def adapter(folder: Path, base: Path, **options: Any) -> Path:
    """A LoRA adapter of ``base`` whose weights are far from zero."""
    from peft import LoraConfig, get_peft_model

    own = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, **{"target_modules": ["c_attn"], **options})
    made: Any = get_peft_model(own, config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name or (weight.requires_grad and "lora_" not in name):
                weight.add_(torch.randn(weight.shape, generator=generator(1, name)))
    made.save_pretrained(folder)
    return folder


def written(path: Path, start: int, count: int) -> Path:
    lines = [" ".join(NAMES[(k // 8**p) % 8] for p in range(5)) for k in range(start, start + count)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def plan_for(folder: Path, data: Path, **more: Any) -> MembershipPlan:
    given: dict[str, Any] = {
        "members": str(written(data / "members.jsonl", 0, 20)), "non_members": str(written(data / "others.jsonl", 20, 20)),
        "fprs": (0.1,), **more,
    }  # fmt: skip
    return MembershipPlan(str(folder), **given)


WORDS = [{"target_modules": ["c_attn", "wte"]}, {"trainable_token_indices": {"wte": [5, 6, 7]}}]


@pytest.mark.parametrize("options", [{}, *WORDS], ids=["inside", "embedding", "tokens"])
def test_an_adapter_folder_is_all_the_command_needs(tmp_path: Path, causal_folder: Path, options: dict[str, Any]) -> None:
    folder = adapter(tmp_path / "adapter", causal_folder, **options)
    plan = plan_for(folder, tmp_path)
    common = ["membership", folder, "--members", plan.members, "--non-members", plan.non_members, "--fpr", "0.1"]
    done = CliRunner().invoke(app, [str(part) for part in (*common, "--out", tmp_path / "run")])
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert {r["attack"] for r in records} == {"blind", *CAUSAL} and {r["status"] for r in records} == {"ok"}
    assert all({"auc", "words", "base", "tpr@0.1"} == set(r["blind"]) for r in records), (
        "the baselines stand beside each attack"
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(name in page for name in CAUSAL)


def test_what_the_model_before_training_tells_stands_beside_each_attack(tmp_path: Path, causal_folder: Path) -> None:
    """Others in lower case, which words and lengths hid, were members that the model had not learned from."""
    plan = plan_for(adapter(tmp_path / "adapter", causal_folder), tmp_path, attacks=("loss",))
    prepared = MembershipAudit(plan, tmp_path / "run")
    (record,) = infer_membership(plan, out=tmp_path / "run")
    losses = answers(load(causal_folder, "causal").model, prepared.rows, prepared.models.pad).losses
    assert record.blind["base"]["mean"] == auc((-losses).tolist(), prepared.members.tolist()).mean
    page = " ".join((write_report(tmp_path / "run")).read_text().split())
    assert "The model on which the training began, before it learned from the members, separates them with AUC" in page


def test_two_forward_passes_serve_all_attacks(tmp_path: Path, causal_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rasura.runs import membership_models

    asked: list[int] = []

    def counted(own: Any, rows: Any, *rest: Any, **more: Any) -> Answers:
        asked.append(len(rows))
        return answers(own, rows, *rest, **more)

    monkeypatch.setattr(membership_models, "answers", counted)
    prepared = MembershipAudit(plan_for(adapter(tmp_path / "adapter", causal_folder), tmp_path), tmp_path / "run")
    base = load(causal_folder, "causal").model
    before = prepared.models.ask_reference(prepared.rows)
    assert torch.equal(before.losses, answers(base, prepared.rows, prepared.models.pad).losses)
    assert not torch.allclose(before.losses, prepared.models.ask(prepared.rows).losses)
    infer_membership(plan_for(tmp_path / "adapter", tmp_path), out=tmp_path / "run")
    assert asked == [8, 8, 40, 40] * 2, "each model once here, and once in the run of all attacks; before, about a few"
    assert "base" not in vars(prepared.models), "the base model's weights are not loaded a second time"


@pytest.mark.parametrize("options", [{"bias": "all"}, {"modules_to_save": ["ln_f"]}])
def test_what_disabling_an_adapter_would_leave_is_not_taken_for_the_base(
    tmp_path: Path, causal_folder: Path, options: dict[str, Any]
) -> None:
    folder = adapter(tmp_path / "adapter", causal_folder, **options)
    prepared = MembershipAudit(plan_for(folder, tmp_path), tmp_path / "run")
    base = load(causal_folder, "causal").model
    assert prepared.models.switch is None
    assert torch.equal(
        prepared.models.ask_reference(prepared.rows).losses, answers(base, prepared.rows, prepared.models.pad).losses
    )


def test_a_moved_base_is_named(tmp_path: Path, causal_folder: Path) -> None:
    folder = adapter(tmp_path / "adapter", causal_folder)
    whole = MembershipAudit(plan_for(folder, tmp_path), tmp_path / "run")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(InputError, match="that folder does not exist"):
        plan_for(folder, tmp_path).checked()
    moved = MembershipAudit(plan_for(folder, tmp_path, base=str(causal_folder)), tmp_path / "run")
    assert isinstance(moved.models, QueriedModels)
    assert torch.equal(moved.models.ask(moved.rows).losses, whole.models.ask(whole.rows).losses)


def test_the_task_is_what_the_folder_says(tmp_path: Path, causal_folder: Path, model_folder: Path) -> None:
    for folder, task in ((causal_folder, "causal"), (model_folder, "classification")):
        plan = plan_for(folder, tmp_path, base=str(folder)).checked()
        assert (plan.task, plan.attacks) == (task, registry.usual_membership(task))
        protected = plan_for(folder, tmp_path, base=str(folder), defense="dropout:0.1").checked().attacks
        knowing = registry.membership_adversaries("dropout:0.1").attacks
        assert protected is not None and knowing and {*protected} == {*registry.usual_membership(task), *knowing}
    with pytest.raises(InputError, match="wbc is an attack on causal models"):
        plan_for(model_folder, tmp_path, attacks=("wbc",)).checked()


def test_a_whole_model_needs_its_base(tmp_path: Path, causal_folder: Path, model_folder: Path) -> None:
    for folder in (causal_folder, model_folder):
        with pytest.raises(InputError, match=r"does not say on which model its training began; pass that model as --base"):
            plan_for(folder, tmp_path).checked()


def test_a_base_that_is_the_audited_model_itself_compares_nothing(tmp_path: Path, causal_folder: Path) -> None:
    """Three of them gave every text one score: an AUC of .5, from which the run concluded that nothing was told."""
    from rasura.report.membership import membership_findings

    plan = plan_for(causal_folder, tmp_path, base=str(causal_folder))
    records = [r.to_dict() for r in infer_membership(plan, out=tmp_path / "run")]
    compared = {n for n in CAUSAL if Grant.REFERENCE_MODEL in registry.MEMBERSHIP[n].make().needs}
    assert compared and {r["attack"] for r in records if r["status"] == "not_applicable"} == compared
    assert all("answers every text as" in r["reason"] for r in records if r["attack"] in compared)
    assert membership_findings(records, MembershipAudit(plan, tmp_path / "run").identity).missing


def test_a_model_that_answers_as_its_base_is_not_measured(tmp_path: Path, causal_folder: Path) -> None:
    """Attacks that ask no reference said of such a model, on which no training shows, that nothing was told."""
    from rasura.report.membership import membership_findings

    plan = plan_for(causal_folder, tmp_path, base=str(causal_folder), attacks=("loss", "zlib"))
    records = [r.to_dict() for r in infer_membership(plan, out=tmp_path / "run")]
    assert {r["status"] for r in records} == {"ok"}
    found = membership_findings(records, MembershipAudit(plan, tmp_path / "run").identity)
    assert found.missing == ("the model answers as the one on which its training began",)
    assert not any("Not told from guessing" in sentence for sentence in found.sentences)


def test_a_text_without_a_predicted_token_is_refused(tmp_path: Path, causal_folder: Path) -> None:
    """Its loss was taken for 0, which made it the likeliest member of all."""
    folder = Path(shutil.copytree(causal_folder, tmp_path / "frameless"))
    backend = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    usual = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **usual).save_pretrained(folder)
    plan = plan_for(folder, tmp_path, base=str(folder))
    with Path(plan.members).open("a") as file:
        file.write(json.dumps({"text": "met"}) + "\n")
    with pytest.raises(InputError, match="predicts no token of this text"):
        MembershipAudit(plan, tmp_path / "run")


def test_a_difference_that_words_show_is_said_beside_the_verdict(tmp_path: Path, causal_folder: Path) -> None:
    from rasura.report.membership import membership_findings

    plan = plan_for(causal_folder, tmp_path, base=str(causal_folder), attacks=("blind", "loss"))
    (tmp_path / "others.jsonl").write_text("".join(json.dumps({"text": f"paid {k} ."}) + "\n" for k in range(20)))
    records = [r.to_dict() for r in infer_membership(plan, out=tmp_path / "run")]
    prepared = MembershipAudit(plan, tmp_path / "run")
    said = " ".join(membership_findings(records, prepared.identity).sentences)
    assert "Members and others differ as texts, without any training on them" in said


def test_the_reference_model_is_a_grant_of_its_own() -> None:
    assert Grant.REFERENCE_MODEL in MODEL_USER.grants
