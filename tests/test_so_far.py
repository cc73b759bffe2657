"""Attacks that tell what they have read so far: before they end, and without another result."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder, plan_for
from span_setting import seen_by_server
from torch import Generator

from rasura.attacks.updates.best import Best
from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.core.batches import Batch
from rasura.core.interfaces import Budget
from rasura.core.records import MASK
from rasura.core.rng import generator
from rasura.core.so_far import SoFar, Stage, listening, tell
from rasura.core.values import UNKNOWN, Grant, Observation, Reconstruction, Vocabulary
from rasura.registry import attack as make_attack
from rasura.runs.audit import Audit
from rasura.runs.listened import listened
from rasura.runs.reading import ReadRequest, read_update
from rasura.runs.scoring import recovered_so_far
from rasura.testing.tiny import batch_of, tiny, tokenizer_folder
from rasura.victims.loading import load
from rasura.victims.step import capture

__all__ = ["model_folder"]

TEXT_IDS = [1, 40, 3, 41, 9, 42, 277]


def test_nothing_is_computed_where_nobody_listens() -> None:
    def never() -> list[list[int]]:
        raise AssertionError("it was computed")

    tell(never)
    heard: list[SoFar] = []
    with listening(heard.append):
        tell(lambda: [[1, UNKNOWN]], ordered=False)
    tell(never)
    assert heard == [SoFar(((1, UNKNOWN),), ordered=False)]


class Interrupted:
    """An attack during which the user presses Ctrl-C."""

    name, needs, uses = "late", frozenset[Grant](), frozenset[Grant]()

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        raise KeyboardInterrupt


def test_an_interrupted_portfolio_gives_what_it_has_where_somebody_asked_for_that(tmp_path: Path) -> None:
    victim = load(tokenizer_folder(tiny("bert", "classification"), tmp_path / "model"), "classification")
    path, text = tmp_path / "u.safetensors", victim.tokenizer(["w40 the w41 w42", "w50 w51 w52 w53"], return_tensors="pt")
    capture(victim.model, {**text, "labels": torch.tensor([1, 0])}, path)
    request, begun = ReadRequest(), list[Stage]()
    request.__dict__["method"] = Best(attacks=(EmbeddingRows, Interrupted))
    found = read_update(path, victim, request, begun.append)
    assert [(s.attack, s.guess is None) for s in begun] == [("embedding-rows", True), ("late", False)]
    # A portfolio with a member that is not Rasura's is not taken at its word (``registry.trust``).
    assert found.confidence == "matched" and found.attack == "embedding-rows" and "w40" in found.texts[0]
    assert found.notes[-1] == "stopped during late; attacks that did not end may read more"
    with pytest.raises(KeyboardInterrupt):
        read_update(path, victim, request)  # as in an audit, which is resumed
    request.__dict__["method"] = Best(attacks=(Interrupted,))
    with pytest.raises(KeyboardInterrupt):
        read_update(path, victim, request, begun.append)


def run(audit: Audit, attack: str) -> tuple[Any, Reconstruction]:
    """The guess of ``attack`` on the first cell, and the state of its generator in the end."""
    seen: list[Any] = []
    real: Any = make_attack(attack)

    class Kept:
        name, needs, uses = real.name, real.needs, real.uses

        def __call__(self, observation: Any, *, rng: Any, budget: Any) -> Reconstruction:
            guess = real(observation, rng=rng, budget=budget)
            seen.append((rng.get_state().tolist(), guess))
            return guess

    kept: Any = Kept()
    audit.attacks[attack] = kept
    list(audit.records([next(c for c in audit.cells if c.attack == attack)]))
    return seen[0]


CASES = [
    ("embedding-rows", "none", 1), ("embedding-rows", "none", 3), ("span", "none", 1), ("span", "none", 3),
    ("span", "frozen-embeddings+dropout:0.1", 1), ("lamp-cos", "none", 1),
    pytest.param("grab", "none", 1, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("attack", "defense", "size"), CASES)
def test_an_attack_tells_what_it_reads_and_ends_as_without_a_listener(
    attack: str, defense: str, size: int, model_folder: Path
) -> None:
    plan = plan_for(
        model_folder, attacks=(attack,), defenses=(defense,), batch_sizes=(size,), limit=size, texts=TEXTS[:size]
    )
    quiet, after = run(Audit(plan, baseline=False), attack)
    heard: list[SoFar] = []
    with listening(heard.append):
        state, guess = run(Audit(plan, baseline=False), attack)
    assert state == quiet and guess.tokens == after.tokens and guess.confidence == after.confidence
    assert guess.residual == after.residual and guess.details == after.details
    assert heard and all(len(one.tokens) <= size for one in heard)
    words = [len({t for text in one.tokens for t in text if t > 4}) for one in heard]
    assert words[-1] > 0 and (attack != "span" or size > 1 or len(set(words)) > 3), words


@pytest.mark.parametrize(("family", "shown"), [("llama", None), ("llama", ".1."), ("gpt2", None)])
def test_a_decoders_text_is_told_token_by_token(family: str, shown: str | None) -> None:
    """``shown``: the part of the model whose gradients are visible alone."""
    rows = [TEXT_IDS]
    seen = seen_by_server(tiny(family, "causal", blocks=3), batch_of(rows, "causal"), "causal", shown)
    heard: list[SoFar] = []
    with listening(heard.append):
        guess = make_attack("span")(seen, rng=generator(0), budget=Budget("quick"))
    assert list(guess.tokens[0][:-1]) == rows[0][:-1]
    told = [one.tokens[0] for one in heard if one.ordered]
    assert [len(t) for t in told[:4]] == [1, 2, 3, 4] and all(t == guess.tokens[0][: len(t)] for t in told)


def vocabulary() -> Vocabulary:
    words = ["[PAD]", "mr", "smith", "owes", "40"]
    return Vocabulary(5, lambda ids: " ".join(words[i] for i in ids), lambda text: [], special_ids=frozenset({0}))


def so_far(tokens: list[list[int]], show: bool, ordered: bool = True) -> dict[str, Any]:
    ids = torch.tensor([[1, 2, 3, 4], [3, 4, 3, 4]])
    texts = ("Mr Smith owes 40", "owes 40 owes 40")
    batch = Batch(ids, torch.ones_like(ids), torch.zeros(2, dtype=torch.long), texts, tuple(t.lower() for t in texts))
    return recovered_so_far(SoFar(tuple(map(tuple, tokens)), ordered), batch, vocabulary(), show)


def test_open_places_are_shown_as_open_and_words_are_masked_as_in_a_report() -> None:
    shown = so_far([[0, 1, UNKNOWN, UNKNOWN, 4]], show=True)
    assert shown["read"] == "mr · · 40"
    assert [(w, hit) for w, hit, _ in shown["words"]] == [("Mr", True), ("Smith", False), ("owes", False), ("40", True)]
    hidden = so_far([[0, 1, UNKNOWN, UNKNOWN, 4]], show=False)
    assert hidden["read"] == f"{MASK} · · {MASK}" and {w for w, *_ in hidden["words"]} == {MASK}


def test_no_more_texts_are_looked_at_than_the_batch_holds() -> None:
    """Else the best of many candidates would be shown as read."""
    assert so_far([[3, 4], [3], [1, 2, 3, 4]], show=True)["read"] == "owes 40"


def test_an_audit_tells_between_its_records_and_ends_when_nobody_listens(model_folder: Path) -> None:
    plan = plan_for(model_folder, attacks=("embedding-rows", "span"), defenses=("none",), limit=1, texts=TEXTS[:1])
    audit = Audit(plan, baseline=False)
    kinds = [type(one).__name__ for one in listened(audit)]
    assert kinds[:2] == ["Cell", "SoFar"] and kinds.count("Record") == 2 and kinds.index("Record") < kinds.index("Cell", 1)
    assert kinds[-1] == "Record" and kinds[-2] == "SoFar"
    ended: list[int] = []
    audit.attacks["span"] = Endless(ended)
    heard = listened(audit)
    assert sum(isinstance(one, SoFar) for one in itertools.islice(heard, 8)) > 3
    heard.close()
    assert len(ended) == 1
    audit.attacks["span"] = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        list(listened(audit))


class Endless:
    name, needs, uses = "span", frozenset[Grant](), frozenset[Grant]()

    def __init__(self, ended: list[int]) -> None:
        self.ended = ended

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        try:
            while True:
                tell(lambda: [[7]])
        finally:
            self.ended.append(1)
