"""The portfolio: cheap attacks first, until a reconstruction is certain. The adversary that a policy is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from rasura.attacks.embedding_rows import EmbeddingRows
from rasura.attacks.gradient_matching.presets import dlg, grab
from rasura.attacks.mask_positions import MaskPositions
from rasura.attacks.mechanism import announced_noise
from rasura.attacks.pursuit import Pursuit
from rasura.attacks.span import Span
from rasura.attacks.span_matching import SpanMatching
from rasura.interfaces import Attack, AttackFailed, Budget, NotApplicable
from rasura.rng import child
from rasura.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction

_CERTAINTY = {"verified": 3, "span": 2, "matched": 1, "none": 0}


def _rank(guess: Reconstruction) -> tuple[int, bool, bool, int]:
    holes = sum(t == UNKNOWN for text in guess.tokens for t in text)
    return _CERTAINTY[guess.confidence], guess.ordered, holes == 0, -holes


def _settled(guess: Reconstruction) -> bool:
    """Whether nothing stronger can be expected: verified, or every token of every text named by a span."""
    return guess.confidence == "verified" or _rank(guess)[:3] == (_CERTAINTY["span"], True, True)


@dataclass(frozen=True)
class Best:
    """Runs embedding rows, span, mask positions, pursuit, span matching and gradient matching (GRAB where noise was
    announced and the budget is not quick, else DLG), in this order, until a text is certain.

    Returns the guess with the highest confidence, ordered before bags, complete before holes. ``details`` says what was
    tried and how each ended. ``attacks`` makes the members before matching; each runs only where the threat model grants
    what it needs.
    """

    name: str = "best"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM})
    attacks: tuple[Callable[[], Attack[Reconstruction]], ...] = (EmbeddingRows, Span, MaskPositions, Pursuit, SpanMatching)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        best: Reconstruction | None = None
        winner = ""
        ended: dict[str, str] = {}
        # In noise GRAB reads what no other does; elsewhere, and in a quick look, it is too slow for what it adds.
        matching = grab if announced_noise(seen)[0] > 0 and budget.level != "quick" else dlg
        for make in (*self.attacks, matching):
            attack = make()
            own = torch.Generator().manual_seed(child(rng))
            if any(grant not in seen for grant in attack.needs):
                ended[attack.name] = "not granted"
                continue
            try:
                guess = attack(seen, rng=own, budget=budget)
            except (AttackFailed, NotApplicable) as reason:
                ended[attack.name] = str(reason)
                continue
            ended[attack.name] = guess.confidence
            if best is None or _rank(guess) > _rank(best):
                best, winner = guess, attack.name
            if _settled(guess):
                break
        tried = "; ".join(f"{name}: {end}" for name, end in ended.items())
        if best is None:
            raise AttackFailed(f"no attack of the portfolio read anything ({tried})")
        details: Mapping[str, Parameter] = {**best.details, "attack": winner, "tried": tried}
        return replace(best, details=details)
