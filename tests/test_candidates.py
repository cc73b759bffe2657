"""Candidates: which given texts were in a round, by their own gradients; and no answer where nothing backs one."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import Sequence
from typer.testing import CliRunner

from rasura.attacks.updates.candidates import agreement, fall, last_weights, scores
from rasura.cli import app
from rasura.cli.candidates import listed
from rasura.core.interfaces import InputError
from rasura.core.rng import generator, permutation
from rasura.core.updates import changed
from rasura.data.text import Example
from rasura.metrics.membership import auc, tpr_at
from rasura.registry import parse_update
from rasura.runs.candidate_rounds import reliability, simulate
from rasura.runs.candidates import (
    ENOUGH,
    IN,
    Candidate,
    CandidatesRead,
    inputs_of,
    judged,
    read_candidates,
    rows_of,
)
from rasura.runs.reading import ReadRequest
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny, tokenizer_folder
from rasura.victims.batching import joined
from rasura.victims.loading import Victim, load

ROWS = [batch_of([[CLS, 3 + k, 20 + k, 40 - k, 9, SEP]], "classification", [k % 2]) for k in range(8)]


def victim() -> Victim:
    return Victim(tiny("bert", "classification", num_labels=2), None, VOCABULARY, "classification", "tiny", 64, 2)


@pytest.mark.parametrize(
    "update", ["fedsgd", "local:batch=2/lr=1e-3/epochs=2", "local:batch=4/epochs=3/lr=1e-3/schedule=linear"]
)
def test_the_texts_of_a_round_score_above_others(update: str) -> None:
    one, (local, _) = victim(), parse_update(update)
    inside = joined(ROWS[:4], 0).inputs()
    names = [n for n, _ in one.model.named_parameters()]
    sent, _ = changed(one.model, inside, names, local)
    before = copy.deepcopy(one.model.state_dict())
    found = scores(one.model, inputs_of(ROWS), sent, local)
    assert auc(found, [True] * 4 + [False] * 4).mean > 0.7
    assert all(torch.equal(w, before[n]) for n, w in one.model.state_dict().items())


def test_the_scores_against_the_plain_definitions() -> None:
    model, (local, _) = tiny("bert", "classification", num_labels=2).double(), parse_update("local:batch=0/lr=1e-3")
    names = [n for n, _ in model.named_parameters()]
    sent, _ = changed(model, ROWS[0].inputs(), names, local)
    out = model(**ROWS[1].inputs()).loss
    out.backward()
    own = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n in sent and p.grad is not None])
    flat = torch.cat([sent[n].flatten() for n, p in model.named_parameters() if n in sent and p.grad is not None])
    whole = torch.cat([g.flatten() for g in sent.values()])
    assert agreement(model, ROWS[1].inputs(), sent) == pytest.approx(
        float(own @ flat / (own.norm() * whole.norm())), rel=1e-9
    )
    after = copy.deepcopy(model)
    with torch.no_grad():
        for n, g in sent.items():
            after.get_parameter(n).sub_(1e-3 * g)
        first, last = float(model(**ROWS[1].inputs()).loss), float(after(**ROWS[1].inputs()).loss)
    assert fall(model, ROWS[1].inputs(), last_weights(model, sent, local)) == pytest.approx((first - last) / first, rel=1e-9)


def test_an_answer_needs_a_level() -> None:
    others = [k / 100 for k in range(ENOUGH)]
    assert ENOUGH == 99
    assert judged(5.0, others) == (0.01, "in the round")
    assert judged(0.98, others) == (0.02, "not told")  # it ties with the highest
    assert judged(0.5, others)[1] == "not told"
    assert judged(5.0, others[1:])[1] == "no level"
    assert judged(5.0, []) == (None, "no level")
    assert judged(float("nan"), others) == (1.0, "no level")


def test_nothing_is_said_of_an_empty_update() -> None:
    one = victim()
    with pytest.raises(InputError, match="candidates cannot be compared"):
        scores(one.model, inputs_of(ROWS[:1]), {n: torch.zeros_like(p) for n, p in one.model.named_parameters()})


def test_a_text_of_which_nothing_is_predicted_is_refused_with_its_row(tmp_path: Path) -> None:
    one = load(tokenizer_folder(tiny("gpt2", "causal"), tmp_path / "model"), "causal")
    one.tokenizer.backend_tokenizer.post_processor = Sequence([])  # as SmolLM2's, which adds no special tokens
    first, second, *others = one.tokenizer.get_vocab()
    update = sent_to(tmp_path / "u.safetensors", one, Example(f"{first} {second}"))
    for name, rows in (("c", [f"{first} {second}", others[0]]), ("r", [f"{second} {first}", others[0]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows), encoding="utf-8")
        (tmp_path / f"{name}1.jsonl").write_text(json.dumps({"text": rows[0]}) + "\n", encoding="utf-8")
    for given, references in (("c", "r1"), ("c1", "r")):
        request = ReadRequest(reference=tmp_path / f"{references}.jsonl", update="fedsgd")
        with pytest.raises(InputError, match=r"/[cr]\.jsonl, row 2: the text has one token"):
            read_candidates(update, tmp_path / f"{given}.jsonl", one, request)
    request = ReadRequest(reference=tmp_path / "r1.jsonl", update="fedsgd")
    assert read_candidates(update, tmp_path / "c1.jsonl", one, request).candidates[0].score == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("update", ["fedsgd", "local:batch=0/lr=1e-3"])
def test_a_text_whose_gradient_is_no_number_stops_no_other(update: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, (local, _) = victim(), parse_update(update)
    with torch.no_grad():
        one.model.get_input_embeddings().weight[50] = torch.nan  # type: ignore[operator]  # a Hugging Face model
    sent = {n: torch.ones_like(p) for n, p in one.model.named_parameters() if "classifier" in n}
    bad = batch_of([[CLS, 50, 9, SEP]], "classification", [1])
    found = scores(one.model, inputs_of([ROWS[0], bad]), sent, local)
    assert math.isfinite(found[0]) and math.isnan(found[1])
    listed(CandidatesRead((Candidate("one", found[1], *judged(found[1], [0.5] * ENOUGH)),), ENOUGH), None)
    assert "no level: its gradient or loss is zero or not finite: one" in capsys.readouterr().out
    with pytest.raises(InputError, match="the update is zero or not finite"):
        scores(one.model, inputs_of(ROWS[:1]), {n: torch.full_like(g, torch.nan) for n, g in sent.items()}, local)


def test_simulated_rounds_say_what_the_score_is_worth() -> None:
    one, (local, _) = victim(), parse_update("local:batch=2/lr=1e-3")
    names = [n for n, _ in one.model.named_parameters()]
    rounds = simulate(one, ROWS, names, local, 3, 2, seed=0)
    assert [(len(values), sum(members)) for values, members in rounds] == [(8, 3), (8, 3)]
    assert rounds == simulate(one, ROWS, names, local, 3, 2, seed=0)
    with pytest.raises(InputError, match="expected more"):
        simulate(one, ROWS, names, local, 8, 1, seed=0)


@pytest.mark.parametrize("update", ["fedsgd", "local:batch=2/lr=1e-3"])
def test_simulated_rounds_hide_what_is_hidden(update: str) -> None:
    """Only one entry is seen: each score is the cosine over it, 1 or -1, as that of the candidates is."""
    one, (local, _) = victim(), parse_update(update)
    names = [n for n, _ in one.model.named_parameters() if "classifier" in n]
    visible = {n: torch.zeros_like(one.model.get_parameter(n), dtype=torch.bool) for n in names}
    visible[names[0]].view(-1)[0] = True
    ((values, _),) = simulate(one, ROWS, names, local, 3, 1, seed=0, visible=visible)
    apart = [abs(a - b) for a in values for b in values]
    assert all(min(d, abs(d - 2)) < 1e-6 for d in apart) and max(apart) > 1
    assert simulate(one, ROWS, names, local, 3, 1, seed=0, visible={}) == simulate(one, ROWS, names, local, 3, 1, seed=0)


def test_candidates_are_ranked_among_references_of_their_own_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round of class 1: among references of class 0, most texts of class 1 that were in no round had p <= .01."""
    one = load(tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model"), "classification")
    words = sorted(one.tokenizer.get_vocab())  # the library gives them in another order each time
    drawn = permutation(100_000, generator(3)).tolist()
    texts = [" ".join(words[k % (len(words) - 6) + 6] for k in drawn[8 * n : 8 * n + 8]) for n in range(160)]
    inside = joined(rows_of(one, [Example(t, None, 1) for t in texts[:2]]), 0)
    sent, _ = changed(one.model, inside.inputs(), [n for n, _ in one.model.named_parameters()])
    save_file({n: g.contiguous() for n, g in sent.items()}, str(tmp_path / "update.safetensors"))

    def read(rare: int, given: list[tuple[str, int]]) -> CandidatesRead:
        """With 99 references of the other class, and three of the class ``rare``."""
        for name, rows in (("c", given), ("r", [(t, rare if k < 3 else 1 - rare) for k, t in enumerate(texts[50:152])])):
            lines = [json.dumps({"text": t, "label": label}) + "\n" for t, label in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        request = ReadRequest(reference=tmp_path / "r.jsonl", update="fedsgd")
        return read_candidates(tmp_path / "update.safetensors", tmp_path / "c.jsonl", one, request)

    others = [(t, 1) for t in texts[10:40]]
    found = read(1, [*others, (texts[40], 0)])
    assert {c.verdict for c in found.candidates[:-1]} == {"no level"} and found.few == {"1": 3}
    assert min(c.p or 0 for c in found.candidates[:-1]) >= 1 / 4 and found.candidates[-1].verdict != "no level"
    listed(found, None)
    assert "too few reference texts: 1 (3); an answer needs 99" in " ".join(capsys.readouterr().out.split())
    found = read(0, [(texts[1], 1), *others, (texts[40], 0)])
    assert (found.candidates[0].p, found.candidates[0].verdict) == (0.01, IN), "it was in the round"
    assert sum(c.verdict == IN for c in found.candidates[1:]) <= 1
    assert found.candidates[-1].verdict == "no level" and found.few == {"0": 3}


def test_simulated_rounds_compare_texts_of_the_same_class() -> None:
    """Texts of class 1 score above those of class 0: that says nothing about which of them were in the round."""
    labels = [0] * 200 + [1] * 200
    inside = [k % 2 == 0 for k in range(400)]
    values = [float(member) if label == 0 else 5.0 for label, member in zip(labels, inside)]
    ranked, rate = reliability([(values, inside)] * 3, labels)
    assert ranked is not None and (ranked.mean, ranked.n) == (0.75, 400)
    assert rate is not None and (rate.mean, rate.low, rate.high, rate.n) == (0.5, 0.0, 1.0, 200)
    one = reliability([([float(label) for label in labels], [k >= 100 for k in range(400)])], labels)[0]
    assert one is not None and one.mean == 0.5 and one.n == 200, "class 1 is inside alone: nothing to compare it with"
    assert reliability([([0.0, 1.0], [False, True])], [0, 1]) == (None, None)
    listed(CandidatesRead((), 2, simulated=1, few={"0": 1}), None)


def test_of_many_candidates_it_is_said_how_many_are_in_the_round_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 400 texts that were in no round, four were called so, without a word."""
    found = tuple(Candidate(f"note {k}", 0.5, 0.01, IN if k < 4 else "not told") for k in range(400))
    listed(CandidatesRead(found, ENOUGH, by_chance=4.0), None)
    assert "up to 4 on average are called so by chance" in " ".join(capsys.readouterr().out.split())


def test_candidates_of_a_file(tmp_path: Path, minilm_path: Path) -> None:
    one = load(minilm_path, "classification")
    texts = ["the patient owes 4250 euros", "the court sits at noon", "a letter came from basel", "snow fell all night"]
    batch = rows_of(one, [Example(texts[0], None, 1)])[0]
    sent, _ = changed(one.model, batch.inputs(), [n for n, _ in one.model.named_parameters()])
    save_file({n: g.contiguous() for n, g in sent.items()}, str(tmp_path / "update.safetensors"))
    files = {}
    for name, some in (("given", texts[:2]), ("others", texts[2:])):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in some), encoding="utf-8")
    request = ReadRequest(reference=files["others"])
    told: list[tuple[int, int]] = []
    found = read_candidates(tmp_path / "update.safetensors", files["given"], one, request, 2, lambda *at: told.append(at))
    assert told == [(k, 8) for k in range(1, 9)], "two candidates, and two reference texts in three passes"
    first, second = found.candidates
    assert first.score > 0.999 and first.score > second.score
    assert first.p == pytest.approx(1 / 3) and first.verdict == "no level"
    assert found.auc is not None and found.tpr is None and found.references == 2
    assert found.by_chance == pytest.approx(0.02), "two candidates, each called so by chance in one of a hundred rounds"
    with pytest.raises(InputError, match="1 of the candidates"):
        (tmp_path / "others.jsonl").write_text(json.dumps({"text": texts[0], "label": 1}) + "\n", encoding="utf-8")
        read_candidates(tmp_path / "update.safetensors", files["given"], one, request)


@pytest.fixture(scope="module")
def named(minilm_path: Path) -> Victim:
    one = load(minilm_path, "classification")
    one.model.config.id2label = {0: "negative", 1: "positive"}
    return one


def rows_in(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "label": name}) + "\n" for t, name in rows), encoding="utf-8")
    return path


def sent_to(path: Path, one: Victim, example: Example, factor: float = 1.0) -> Path:
    sent, _ = changed(one.model, rows_of(one, [example])[0].inputs(), [n for n, _ in one.model.named_parameters()])
    save_file({n: (factor * g).contiguous() for n, g in sent.items()}, str(path))
    return path


@pytest.mark.slow
def test_labels_that_are_text_are_the_models_classes_whatever_row_is_first(tmp_path: Path, named: Victim) -> None:
    texts = ["snow fell all night", "the court sits at noon"]
    update = sent_to(tmp_path / "u.safetensors", named, Example(texts[0], None, 0))
    both = [(texts[0], "negative"), (texts[1], "positive")]
    for order in (both, both[::-1], both[:1]):
        found = read_candidates(update, rows_in(tmp_path / "c.jsonl", order), named, ReadRequest(update="fedsgd"))
        assert {c.text: c.score for c in found.candidates}[texts[0]] == pytest.approx(1.0, abs=1e-4)
    for wrong, why in (("bad", "has the classes negative, positive"), ("negative ones", "give the numbers")):
        with pytest.raises(InputError, match=why):
            read_candidates(update, rows_in(tmp_path / "c.jsonl", [(texts[0], wrong)]), named)


def test_a_model_that_does_not_name_its_classes_takes_numbers_alone(tmp_path: Path, minilm_path: Path) -> None:
    one = load(minilm_path, "classification")
    update = sent_to(tmp_path / "u.safetensors", one, Example("snow fell", None, 0))
    with pytest.raises(InputError, match="does not name its classes; give the numbers"):
        read_candidates(update, rows_in(tmp_path / "c.jsonl", [("snow fell", "negative")]), one)


@pytest.mark.slow
def test_the_sign_counts_only_where_it_is_known(tmp_path: Path, named: Victim) -> None:
    """A difference of weights has the opposite sign of the gradient: its text had the lowest score of all."""
    text = "snow fell all night"
    update = sent_to(tmp_path / "u.safetensors", named, Example(text, None, 0), -0.01)
    given = rows_in(tmp_path / "c.jsonl", [(text, "negative"), ("the court sits at noon", "positive")])
    others = rows_in(tmp_path / "o.jsonl", [(f"letter {k} came from basel", "negative") for k in range(6)])
    found = read_candidates(update, given, named, ReadRequest(reference=others), simulated=1)
    assert found.candidates[0].score == pytest.approx(1.0, abs=1e-4) and found.candidates[0].p == pytest.approx(1 / 7)
    assert found.auc is not None and all(0 <= c.score < 1.001 for c in found.candidates)
    said = read_candidates(update, given, named, ReadRequest(update="fedsgd"))
    assert said.candidates[0].score == pytest.approx(-1.0, abs=1e-4)


def test_references_count_once_as_the_model_sees_them(tmp_path: Path, minilm_path: Path) -> None:
    one = load(minilm_path, "classification")
    batch = rows_of(one, [Example("the court sits at noon", None, 1)])[0]
    sent, _ = changed(one.model, batch.inputs(), [n for n, _ in one.model.named_parameters() if "classifier" in n])
    save_file({n: g.contiguous() for n, g in sent.items()}, str(tmp_path / "update.safetensors"))

    def read(*references: str, simulated: int = 0) -> CandidatesRead:
        for name, some in (("given", ("a letter came",)), ("others", references)):
            lines = [json.dumps({"text": t, "label": k % 2}) + "\n" for k, t in enumerate(some)]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        request = ReadRequest(reference=tmp_path / "others.jsonl")
        return read_candidates(tmp_path / "update.safetensors", tmp_path / "given.jsonl", one, request, simulated)

    found = read(*["snow fell", "Snow  fell", "it rained"] * 60, simulated=3)
    assert (found.references, found.repeated, found.candidates[0].verdict) == (2, 178, "no level")
    assert found.auc is not None and (found.auc.n, found.tpr) == (2, None) and found.auc.high - found.auc.low > 0.9
    with pytest.raises(InputError, match="contains 1 of the candidates"):
        read("snow fell", "A letter  came")


@pytest.mark.slow
def test_more_rounds_of_the_same_texts_are_not_more_texts() -> None:
    members = [True] * 100 + [False] * 100
    one = ([float(m) for m in members], members)
    other = ([float(not m) for m in members], members)
    ranked, rate = reliability([one] * 40)
    assert (ranked, rate) == (auc(*one), tpr_at(*one, 0.01)), "as in one round"
    ranked, rate = reliability([one, other])
    assert rate is not None and (ranked.mean, rate.mean) == (0.5, 0.5) and (rate.low, rate.n) == (0.0, 100)
    assert ranked.low < 0.45 and ranked.high > 0.55 and ranked.n == 200
    short = ([float(m) for m in members[1:]], members[1:])
    assert reliability([short] * 40)[1] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"update": "local:batch=2/lr=1e-3/lora=2/dropout=0.1"}, "dropout"),
        ({"update": "fedsgd+bf16"}, "bf16, which --update appends to the message"),
        ({"update": "local:batch=2/lr=1e-3", "frozen_embeddings": True}, "training of the embeddings"),
    ],
)
def test_what_is_not_simulated_has_no_reliability(more: dict[str, Any], why: str, tmp_path: Path, minilm_path: Path) -> None:
    one = load(minilm_path, "classification")
    batch = rows_of(one, [Example("the court sits at noon", None, 1)])[0]
    sent, _ = changed(one.model, batch.inputs(), [n for n, _ in one.model.named_parameters()])
    save_file({n: g.contiguous() for n, g in sent.items()}, str(tmp_path / "update.safetensors"))
    for name, texts in (("given", ["a letter came"]), ("others", ["snow fell", "it rained"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in texts))
    request, files = ReadRequest(reference=tmp_path / "others.jsonl", **more), (tmp_path / "update.safetensors",)
    with pytest.raises(InputError, match=f"reliability cannot be measured: simulated rounds have no {why}"):
        read_candidates(*files, tmp_path / "given.jsonl", one, request, simulated=1)
    found = read_candidates(*files, tmp_path / "given.jsonl", one, request)
    assert (found.simulated, found.auc, found.candidates[0].verdict) == (0, None, "no level")


@pytest.mark.parametrize(("classes", "kind"), [(1, None), (3, "multi_label_classification")])
def test_candidates_of_a_model_whose_labels_are_no_classes_are_refused(tmp_path: Path, classes: int, kind: Any) -> None:
    """The gradient of a regression points the other way for another number; several labels ended in a traceback."""
    one = Victim(tiny("bert", "classification", num_labels=classes), None, VOCABULARY, "classification", "tiny", 64, classes)
    one.model.config.problem_type = kind  # type: ignore[union-attr]  # a Hugging Face config
    with pytest.raises(InputError, match="not a classifier with one label a text"):
        read_candidates(tmp_path / "update.safetensors", tmp_path / "candidates.jsonl", one)


def test_a_file_of_another_type_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for name in ("update.safetensors", "given.txt"):
        (tmp_path / name).write_text("snow fell all night", encoding="utf-8")
    update, given, missing = (str(tmp_path / name) for name in ("update.safetensors", "given.txt", "no-model"))
    for options in (["--candidates", given], ["--reference", given]):
        done = CliRunner().invoke(app, ["read", update, "--model", missing, "--task", "causal", *options])
        assert isinstance(done.exception, InputError) and "unknown file type .txt" in str(done.exception)
