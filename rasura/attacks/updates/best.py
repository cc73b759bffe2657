"""The portfolio: cheap attacks first, until a reconstruction is certain. The adversary that a policy is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rasura.attacks.shared.comparing import inner_product
from rasura.attacks.shared.mechanism import announced_dropout, announced_noise
from rasura.attacks.shared.verify import check, entries
from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.attacks.updates.gradient_matching.engine import GradientMatching
from rasura.attacks.updates.gradient_matching.presets import dlg, lamp_weighted
from rasura.attacks.updates.joint_pursuit import JointPursuit
from rasura.attacks.updates.mask_positions import MaskPositions
from rasura.attacks.updates.noise_in_sight import shows_noise
from rasura.attacks.updates.prefix_matching import PrefixMatching
from rasura.attacks.updates.pursuit import Pursuit
from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span_matching import SpanMatching
from rasura.core.interfaces import Attack, AttackFailed, Budget, NotApplicable
from rasura.core.mechanisms import Dropout
from rasura.core.rng import child
from rasura.core.so_far import begin
from rasura.core.specs import AttackSpec, Home, Portfolio
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction

_CERTAINTY = {"verified": 3, "span": 2, "matched": 1, "none": 0}

ROUNDED = 5e-3
"""Relative error up to which nothing but rounding to 16 bits tells an ordered text of a causal model from the update: exact
texts of SmolLM2-135M leave .0016 to .0018 at bfloat16, and one wrong token 1e-2 and more. No attack finds a nearer one."""

EXPLAINS_NOTHING = 0.9
"""Relative error, without noise, above which an ordered text of a causal model is no better than a bag (measured on
batches of more tokens than stories260K has dimensions: .94 to 1, with 2 to 9 words named where the bag names 22 to 31 right
ones)."""


def _rank(guess: Reconstruction, seen: Observation) -> tuple[bool, int, int, bool, int, float]:
    """Greater is better: a text that holds words, surer, ordered, whole, with fewer holes, nearer to the gradient.

    An order that explains nothing of a causal update comes after a bag. Dropout leaves large errors of right texts, and so
    do signs, for which the attack itself judges the order.
    """
    holes = sum(t == UNKNOWN for text in guess.tokens for t in text)
    words = any(t != UNKNOWN and t not in seen.vocabulary.special_ids for text in guess.tokens for t in text)
    error = check(seen, guess.tokens)[0] if guess.ordered and words and not holes else float("inf")
    blurred = seen.task != "causal" or announced_dropout(seen) > 0 or bool(guess.details.get("signs"))
    fits = guess.confidence != "matched" or holes > 0 or blurred or _explained(seen, error) >= 1 - EXPLAINS_NOTHING**2
    order = 1 if not guess.ordered else 2 if fits else 0
    return words, _CERTAINTY[guess.confidence], order, holes == 0, -holes, -error


def _explained(seen: Observation, error: float) -> float:
    """The share of the squared norm of ``seen``, less that of its noise, which a guess of the relative ``error`` explains.
    Where noise has so much of it that the rest is not told from none, the least that would be told counts."""
    total = sum(inner_product(g.flatten(), g.flatten()) for g in seen.gradients.values())
    noise = announced_noise(seen)[0] ** 2
    shown = entries(seen)
    left = max(total - noise * shown, 3 * noise * math.sqrt(2 * shown))
    return (1 - error**2) * total / left if left > 0 and math.isfinite(error) else 0.0


def _settled(guess: Reconstruction, seen: Observation, by: str) -> bool:
    """Whether nothing stronger than the ``guess`` of the attack ``by`` can be expected: verified, every place of every text
    named by a span, or a text of a causal model from which the update differs by rounding, or by that of a training in 16
    bits, where the last block told every word in turn (``chained``). The last word of a causal text may lack where ``span``
    left it open: it is no input, and what ``span`` cannot name of it no other attack does."""
    if guess.confidence == "verified":
        return True
    if guess.details.get("beginnings") and by == EmbeddingRows.name:  # of several texts span may tell all
        return False
    lengths = sorted(seen.lengths) == sorted(map(len, guess.tokens)) if Grant.LENGTHS in seen else True
    worded = all(any(t not in seen.vocabulary.special_ids for t in text) for text in guess.tokens)
    last_may_lack = seen.task == "causal" and guess.confidence == "span" and by == Span.name
    inputs = [text[:-1] if last_may_lack else text for text in guess.tokens]
    holes = sum(t == UNKNOWN for text in inputs for t in text)
    whole = bool(guess.tokens) and worded and holes in (0, guess.details.get("twins"))  # no attack tells twins apart
    if not (guess.ordered and whole and lengths):
        return False
    if guess.confidence == "span" or guess.details.get("chained"):
        return True
    return seen.task == "causal" and check(seen, guess.tokens)[0] <= ROUNDED


def _orders(guess: Reconstruction, bag: Reconstruction) -> bool:
    """Whether ``guess`` is one text with all words of ``bag``, which is surer of them and has no order."""
    alone = len(bag.tokens) == len(guess.tokens) == 1
    return alone and not bag.ordered and {*bag.tokens[0]} <= {*guess.tokens[0], UNKNOWN}


def matching(seen: Observation) -> Callable[[], GradientMatching]:
    """The last resort: weighted LAMP in noise, which reads about what GRAB does in a third of its time. Elsewhere that is
    too slow for what it adds to DLG."""
    return lamp_weighted if announced_noise(seen)[0] > 0 or shows_noise(seen) else dlg


def _unclaimed(seen: Observation) -> tuple[Observation, str] | None:
    """``seen`` without what it has of the texts on somebody's word, without dropout and the sign of a gradient, where they
    are stated alike; and their names. None if there is nothing."""
    named = [grant.name.lower().replace("_", " ") for grant in Grant if grant in seen.claimed - {Grant.MECHANISM}]
    granted = {grant: value for grant, value in seen.granted.items() if grant not in seen.claimed}
    if Grant.MECHANISM in seen.claimed:
        granted[Grant.MECHANISM] = tuple(m for m in seen.mechanism if not isinstance(m, Dropout))
        named += ["dropout"] * (granted[Grant.MECHANISM] != seen.mechanism)
    message = seen.message
    if message.sign == "stated" and message.kind == "fedsgd":
        message, named = replace(message, sign="unknown"), [*named, "sign"]
    return (replace(seen, message=message, granted=granted), ", ".join(named)) if named else None


@dataclass(frozen=True)
class Best:
    """Runs embedding rows, span, joint pursuit, mask positions, pursuit, span matching and gradient matching (weighted
    LAMP where noise was announced or shows itself, else DLG), in this order, until a text is certain:
    verified, or a span of whole texts in order, of the granted lengths. Once one finds nothing but the signs of a causal
    model's text, prefix matching takes the place of the rest.

    What is known on somebody's word alone (``Observation.claimed``) may be wrong. So while nothing is verified with it,
    embedding rows and span look once with it and once without.

    Returns the guess with the highest confidence, ordered before bags (unless the order explains nothing of a causal
    update), complete before holes, and of equals the one whose gradient is nearest to the observed one. A guess without a
    word is the last choice. ``details`` says what was tried and how each ended; ``ran`` names those that ran to their end,
    whether they read anything or not; ``without`` what was granted and not used, where the same attack proved nothing with
    it. ``attacks`` makes the members before matching; each runs only where the threat model grants what it needs.
    """

    name: str = "best"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM})
    attacks: tuple[Callable[[], Attack[Reconstruction]], ...] = (
        EmbeddingRows, Span, JointPursuit, MaskPositions, Pursuit, SpanMatching,
    )  # fmt: skip

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        best: Reconstruction | None = None
        rank = None
        winner, settled = "", False
        ended: dict[str, str] = {}
        ran: list[str] = []

        def tried() -> str:
            return "; ".join(f"{name}: {end}" for name, end in ended.items())

        def so_far() -> Reconstruction | None:
            told: dict[str, Parameter] = {"attack": winner, "ran": ",".join(ran), "tried": tried()}
            return None if best is None else replace(best, details={**best.details, **told})

        left: list[tuple[Callable[[], Attack[Reconstruction]], Observation]]
        left = [(make, seen) for make in (*self.attacks, matching(seen))]
        bare, stated = _unclaimed(seen) or (None, "")
        again = [] if bare is None else [make for make in self.attacks if make in (EmbeddingRows, Span)]
        if bare is not None:
            left[len(again) : len(again)] = [(make, bare) for make in again]
        while left:
            make, view = left.pop(0)
            attack = make()
            name = attack.name + " without what was stated" * (view is bare)
            own = torch.Generator().manual_seed(child(rng))
            if any(grant not in view for grant in attack.needs):
                ended[name] = "not granted"
                continue
            begin(attack.name, so_far)
            try:
                guess = attack(view, rng=own, budget=budget)
            except NotApplicable as reason:
                ended[name] = str(reason)
                continue
            except AttackFailed as reason:
                ran.append(attack.name)
                ended[name] = str(reason)
                continue
            ran.append(attack.name)
            ended[name] = guess.confidence
            if view is bare and attack.name in ended:
                guess = replace(guess, details={**guess.details, "without": stated})
            if _settled(guess, view, attack.name):
                proven = guess.confidence == "verified"
                if proven or not settled:
                    best, winner, settled = guess, attack.name, True
                left = [] if proven else [(m, v) for m, v in left if m in again]  # nothing is stronger but a proof
            if settled:
                continue
            own_rank = _rank(guess, view)
            fits = own_rank[2] == 2
            if rank is None or best is None or own_rank > rank or (fits and _orders(guess, best)):
                best, winner, rank = guess, attack.name, own_rank
            if view.task == "causal" and guess.details.get("signs"):  # only one attack behind reads signs, of one text
                alone = Grant.BATCH_SIZE not in view or view.batch_size == 1
                left = [(PrefixMatching, view)] if alone and not guess.ordered else []
        if (found := so_far()) is None:
            raise AttackFailed(f"no attack of the portfolio recovered anything ({tried()})", {"ran": ",".join(ran)})
        return found


SPEC = AttackSpec(
    name="best",
    about="portfolio: runs cheap attacks first and stops once a text is certain",
    source="Rasura",
    make=Best,
    seconds=0.8,
    growth=0.15,
    pairs=125.0,
    work={"quick": 0.9, "default": 1.0, "paper": 3.0},
    portfolio=Portfolio(
        always=frozenset({"embedding-rows", "span", "mask-positions"}),
        last="dlg",
        instead="lamp-weighted",
        causal="span-matching",
        signs="prefix-matching",
    ),
    home=Home(reads=True),
)
