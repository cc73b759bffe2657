"""What is believed of an attack that is not Rasura's, whatever it says of its guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Generator

import rasura
from rasura.attacks.updates.best import Best
from rasura.attacks.updates.span import Span
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Confidence, Grant, Message, Observation, Proof, Reconstruction
from rasura.registry import trusted
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny, tokenizer_folder
from rasura.victims.step import step

TEXT = (CLS, 40, 3, 41, 9, 42, SEP)


@dataclass(frozen=True)
class Says:
    """Names one text, and says that it is proven."""

    text: tuple[int, ...] = TEXT
    confidence: Confidence = "verified"
    name: str = "says"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = field(default=frozenset())

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        proof = Proof("gradient", (self.text,), 0.0, 1.0, (0,)) if self.confidence == "verified" else None
        return Reconstruction((self.text,), self.confidence, labels=(0,), proof=proof)


@pytest.fixture(scope="module")
def seen() -> Observation:
    sent = step(tiny("bert", "classification"), batch_of([list(TEXT)], "classification", [1]),
                task="classification", vocabulary=VOCABULARY, rng=generator(0))  # fmt: skip
    return observe(sent, HONEST_SERVER)


def said(attack: Says | Span, seen: Observation) -> Reconstruction:
    return trusted(attack(seen, rng=generator(0), budget=Budget("quick")), seen, attack)


def test_a_proof_of_another_attack_is_made_again(seen: Observation) -> None:
    right, wrong = said(Says(), seen), said(Says((CLS, 40, 3, 41, 9, 43, SEP)), seen)
    assert right.confidence == "verified" and right.labels == (1,) and right.proof is not None and right.proof.decoys < 1
    assert wrong.confidence == "matched" and wrong.proof is None and wrong.tokens == ((CLS, 40, 3, 41, 9, 43, SEP),)
    assert said(Says(confidence="span"), seen).confidence == "matched"
    assert said(Says(confidence="matched"), seen) == Says(confidence="matched")(seen, rng=generator(0), budget=Budget())


def test_what_ours_say_stays(seen: Observation) -> None:
    guess = Span()(seen, rng=generator(0), budget=Budget("quick"))
    assert trusted(guess, seen, Span()) is guess and guess.confidence == "verified"

    class Mine(Span):
        pass

    again = trusted(replace(guess, labels=(2,)), seen, Mine())
    assert again.confidence == "verified" and again.labels == (1,)


def test_our_portfolio_of_anothers_attacks_is_not_ours(seen: Observation) -> None:
    mine = Best(attacks=(partial(Says, (CLS, 40, 3, 41, 9, 43, SEP)),))
    guess = mine(seen, rng=generator(0), budget=Budget("quick"))
    assert guess.confidence == "verified" and trusted(guess, seen, mine).confidence == "matched"
    ours = Best()(seen, rng=generator(0), budget=Budget("quick"))
    assert trusted(ours, seen, Best()) is ours and ours.confidence == "verified"


def test_a_whole_text_of_another_attack_casts_no_doubt_on_what_is_stated(seen: Observation) -> None:
    """Span was then asked without the batch size alone, and it read as if nothing were proven with it."""
    stated = replace(seen, claimed=frozenset({Grant.BATCH_SIZE}))
    guess = Best(attacks=(partial(Says, TEXT, "span"), Span))(stated, rng=generator(0), budget=Budget("quick"))
    assert guess.confidence == "verified" and guess.tokens == (TEXT,) and "without" not in guess.details


@pytest.mark.parametrize("confidence", ["verified", "span", "matched", "none"])
def test_an_update_of_zeros_supports_no_guess(seen: Observation, confidence: Confidence) -> None:
    zeros = {n: torch.zeros_like(g) for n, g in seen.gradients.items()}
    shown = {n: g == 0 for n, g in seen.gradients.items()}  # all that is not zero is hidden
    for message in (Message(zeros), Message(zeros, shown)):
        guess = said(Says(confidence=confidence), replace(seen, message=message))
        assert guess.confidence == "none" and guess.proof is None and guess.tokens == (TEXT,)


def test_an_audit_does_not_take_a_plug_in_at_its_word(tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")
    texts = ["w40 the w41 w42"]
    records = rasura.audit(model=str(folder), data=texts, attacks=[Says(), "blind"], defenses=["none"], out=tmp_path / "run")
    (record,) = [r for r in records if r.attack == "says"]
    assert record.status == "ok" and record.confidence == "matched"


@dataclass(frozen=True)
class Copies:
    """Says as its guess the labels that it is told, and declares them as ``needs`` and ``uses`` say."""

    name: str = "copies"
    needs: frozenset[Grant] = frozenset({Grant.MODEL})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        return Reconstruction((), "matched", labels=tuple(seen.labels.tolist()))


def test_labels_that_an_attack_is_told_are_not_read_from_the_update(tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")
    needing = Copies("needing", needs=frozenset({Grant.LABELS}))
    using = Copies("using", uses=frozenset({Grant.LABELS}))
    plan = rasura.Plan(threats=("with-labels",), texts=("w40 the w41 w42",), model=str(folder), defenses=("none",))
    records = rasura.audit(plan, attacks=["blind", Copies(), needing, using], out=tmp_path / "run")
    found = {r.attack: r for r in records}
    assert found["copies"].status == "crashed" and found["copies"].reason.startswith("NotGranted: LABELS ")
    for attack in ("needing", "using"):
        assert found[attack].status == "ok" and "label_accuracy" not in found[attack].scores


def test_what_a_guess_says_of_itself_wrongly_is_told_in_words(tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")

    def attack(name: str, **guess: object) -> Guesses:
        return Guesses(name, guess)

    records = rasura.audit(
        model=str(folder), data=["w40 the w41 w42"], defenses=["none"], out=tmp_path / "run",
        attacks=[
            "blind", attack("unproven", confidence="verified"), attack("pictures", images=torch.zeros(1, 3, 8, 8)),
            attack("numbered", details={1: 1.0}), attack("listed", details=[1.0]),
        ],
    )  # fmt: skip
    said = {r.attack: (r.status, r.reason) for r in records if r.attack != "blind"}
    assert {status for status, _ in said.values()} == {"crashed"}
    assert "verified needs a proof" in said["unproven"][1]
    assert "images of a batch of texts; expected tokens" in said["pictures"][1]
    assert "details: 1 is int; expected a name" in said["numbered"][1]
    assert "details is list; expected figures by their names" in said["listed"][1]


@dataclass(frozen=True)
class Guesses:
    """Guesses one token, with what else ``guess`` says."""

    name: str
    guess: Mapping[str, object]
    needs: frozenset[Grant] = frozenset({Grant.MODEL})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        return Reconstruction(((40,),), **{"confidence": "matched", **self.guess})  # type: ignore[arg-type]  # is tested
