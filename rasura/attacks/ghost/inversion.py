"""GHOST read back by an adversary who knows it: from the substitutes in a gradient to the tokens that they stand for.

The mechanism names the settings and the model is public, so the table of shadow tokens can be computed, and with it
the *preimages* of every substitute: the tokens that may have become it. The paper's strategies choose among them by
similarity (Feng et al. 2026, sec. 5.7); ``lattice`` (ours) weighs each by the chance that it became this substitute, which
is the larger the fewer and the farther its other substitutes are, and by what the language expects, in a beam search over
the whole text. Then it runs the selection again on what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from rasura.attacks.ghost.lattice import Options, likeliest
from rasura.attacks.ghost.rerun import Rerun, asked_again
from rasura.attacks.updates.best import Best
from rasura.core.interfaces import AttackFailed, Budget, InputError, NotApplicable, Prior
from rasura.core.rng import generator
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import UNKNOWN, Grant, Observation, Reconstruction
from rasura.ghost.models import made_for, searchable
from rasura.ghost.neighbours import unit_rows
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import ShadowSettings, ShadowTable, token_embedding
from rasura.priors import language

Strategy = Literal["sampling", "maximum", "median", "mean", "lattice"]
Settings = TypeVar("Settings", ShadowSettings, Selection)


NEARNESS = 5.0
"""How fast the chance of a substitute falls with its squared distance, in units of the mean over a table: the selection
prefers near ones. On 64 sentences of SST-2, MiniLM, 2 to 10 read the same within a hundredth; 0, that all are alike, reads
up to a fifth less behind balanced groups."""


class Preimages:
    """Which tokens may have become a substitute, by ``table``, made for the ``embedding`` ``(tokens, hidden)``."""

    def __init__(self, table: ShadowTable, embedding: Tensor) -> None:
        originals = torch.repeat_interleave(torch.arange(len(table)), table.offsets.diff())
        numbers = table.groups.long()
        rows = embedding.detach().float()
        sums = torch.zeros_like(rows).index_add_(0, numbers, rows)
        centres = sums / torch.bincount(numbers, minlength=len(rows)).clamp_min(1)[:, None]
        away = torch.empty(len(originals), dtype=torch.double)
        for start in range(0, len(away), 1 << 16):
            part = slice(start, start + (1 << 16))
            away[part] = (rows[table.ids[part].long()] - centres[numbers[originals[part]]]).square().sum(1).double()
        weights = (-NEARNESS * away / away.mean().clamp_min(1e-12)).exp().clamp_min(1e-9)
        total = torch.zeros(len(table), dtype=torch.double).index_add_(0, originals, weights)
        order = table.ids.long().argsort(stable=True)
        self._originals = originals[order]
        self._chances = (weights / total[originals])[order]
        counts = torch.bincount(table.ids.long(), minlength=len(table))
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

    def of(self, token: int) -> tuple[Tensor, Tensor]:
        """The originals of ``token`` ``(n,)`` and for each the chance that it became this token."""
        part = slice(int(self._offsets[token]), int(self._offsets[token + 1]))
        return self._originals[part], self._chances[part]


@lru_cache(maxsize=4)
def preimages_of(table: ShadowTable, model: nn.Module) -> Preimages:
    """Kept, since every cell of an audit asks for the same."""
    return Preimages(table, token_embedding(model))


def announced_ghost(seen: Observation) -> ShadowSettings:
    """The settings that the mechanism states. Raises ``NotApplicable`` if it does not include GHOST."""
    return _announced(seen, ShadowSettings)


def _announced(seen: Observation, kind: type[Settings]) -> Settings:
    for m in seen.mechanism if Grant.MECHANISM in seen else ():
        if m.name == "ghost":
            told: dict[str, Any] = {n: m.parameters[n] for n in kind.__dataclass_fields__ if n in m.parameters}
            return kind(**told)
    raise NotApplicable("no protection by ghost was announced, so there is nothing to invert")


def substitutes(seen: Observation, budget: Budget) -> Reconstruction:
    """What the portfolio reads; the same for every strategy, so the last one is kept."""
    if not _READ or _READ[0] is not seen.message or _READ[1:3] != [frozenset(seen.granted), budget]:
        _READ[:] = [seen.message, frozenset(seen.granted), budget, Best()(seen, rng=generator(0, "read"), budget=budget)]
    found: Reconstruction = _READ[3]
    return found


_READ: list[Any] = []


def possible(text: Sequence[int], preimages: Preimages, fixed: frozenset[int]) -> Options:
    """At every place of ``text`` its preimages; ``fixed`` tokens and those without preimages stay."""
    out: list[tuple[Tensor, Tensor]] = []
    for token in text:
        originals, chances = preimages.of(token) if token >= 0 else (torch.empty(0), torch.empty(0))
        if token in fixed or not len(originals):
            originals, chances = torch.tensor([token]), torch.ones(1, dtype=torch.double)
        out.append((originals, chances))
    return out


def inverted(
    text: Sequence[int],
    preimages: Preimages,
    strategy: Strategy,
    *,
    embedding: Tensor,
    fixed: frozenset[int],
    prior: Prior | None,
    rng: torch.Generator,
    beam: int,
    tried: int,
) -> tuple[int, ...]:
    """The original of an obfuscated ``text`` (ids). ``fixed`` tokens and those without preimages stay; ``embedding``
    ``(tokens, hidden)`` is the public one. ``beam`` texts are kept by ``lattice``, ``tried`` originals a place."""
    options = possible(text, preimages, fixed)
    if strategy == "lattice":
        return likeliest(options, prior, fixed, beam, tried)
    out = []
    for token, (originals, _) in zip(text, options):
        if len(originals) == 1:
            out.append(int(originals[0]))
            continue
        rows = embedding[originals].float()
        likeness = unit_rows(rows) @ unit_rows(embedding[[token]])[0]
        if strategy == "sampling":
            k = int(torch.multinomial(likeness.clamp_min(1e-6), 1, generator=rng))
        elif strategy == "maximum":
            k = int(likeness.argmax())
        elif strategy == "median":
            k = int(likeness.argsort()[len(likeness) // 2])
        else:
            k = int((unit_rows(rows) @ rows.mean(0)).argmax())
        out.append(int(originals[k]))
    return tuple(out)


@dataclass(frozen=True)
class ShadowInversion:
    """Reads the substitutes with the portfolio, then inverts them by ``strategy``."""

    name: str
    strategy: Strategy
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL, Grant.MECHANISM})
    uses: frozenset[Grant] = frozenset(
        {Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.REFERENCE_TEXT, Grant.LANGUAGE_MODEL}
    )
    work: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"quick": (4, 8, 0), "default": (16, 32, 1), "paper": (64, 128, 2)}
    )
    """Budget level -> texts kept, originals tried at a place, sweeps in which the selection is run again."""

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        settings = announced_ghost(seen)
        read = substitutes(seen, budget)
        table = made_for(seen.model, seen.vocabulary, settings)
        embedding = token_embedding(seen.model)
        try:
            prior: Prior | None = language(seen) if self.strategy == "lattice" else None
        except InputError as error:
            raise AttackFailed(str(error)) from None
        beam, tried, sweeps = self.work[budget.level]
        preimages = preimages_of(table, seen.model)
        texts = tuple(
            inverted(
                text, preimages, self.strategy, embedding=embedding, fixed=seen.vocabulary.special_ids, prior=prior,
                rng=rng, beam=beam, tried=tried,
            )
            for text in read.tokens
        )  # fmt: skip
        if self.strategy == "lattice" and sweeps and read.confidence != "none":
            texts = self._again(seen, table, read.tokens, texts, prior, beam, sweeps)
        details = {k: v for k, v in read.details.items() if k != "proof"}
        details |= {"substitutes": read.confidence, "strategy": self.strategy}
        # What verifies the substitutes says nothing of the originals.
        return replace(read, tokens=texts, confidence="matched", proof=None, labels=read.labels, details=details)

    @staticmethod
    def _again(
        seen: Observation, table: ShadowTable, read: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]],
        prior: Prior | None, beam: int, sweeps: int,
    ) -> tuple[tuple[int, ...], ...]:  # fmt: skip
        """What was ``found``, after the selection ran again on it. What was drawn, or not wholly ``read``, stays."""
        selection, fixed = _announced(seen, Selection), seen.vocabulary.special_ids
        if not selection.sweeps and selection.start == "random":
            return tuple(found)
        selector = Selector(searchable(seen.model), table, fixed, selection)
        preimages = preimages_of(table, seen.model)
        return tuple(
            guess if UNKNOWN in text
            else asked_again(guess, possible(text, preimages, fixed), Rerun(selector, text), prior, fixed, beam, sweeps)
            for text, guess in zip(read, found)
        )  # fmt: skip


def lattice() -> ShadowInversion:
    """Preimages, the chance of each, and the language (ours)."""
    return ShadowInversion("ghost-lattice", "lattice")


def sampling() -> ShadowInversion:
    """A preimage drawn by its similarity (sec. 5.7)."""
    return ShadowInversion("ghost-sampling", "sampling")


def maximum() -> ShadowInversion:
    """The preimage most similar to the substitute (sec. 5.7)."""
    return ShadowInversion("ghost-maximum", "maximum")


def median() -> ShadowInversion:
    """The preimage of median similarity (sec. 5.7)."""
    return ShadowInversion("ghost-median", "median")


def mean() -> ShadowInversion:
    """The preimage most similar to the preimages' mean (sec. 5.7)."""
    return ShadowInversion("ghost-mean", "mean")


LATTICE = AttackSpec(
    name="ghost-lattice",
    about="against ghost: decodes substitutes by their probability and a language model",
    source="Rasura",
    make=lattice,
    seconds=2.0,
    once=3.0,
    growth=0.5,
    work={"quick": 0.1, "default": 1.0, "paper": 5.0},
    protection=True,
    home=Home(defense="ghost"),
)

SAMPLING = AttackSpec(
    name="ghost-sampling",
    about="against ghost: samples a token by its similarity to the substitute",
    source="GHOST, sec. 5.7",
    make=sampling,
    seconds=0.5,
    once=3.0,
    protection=True,
    home=Home(defense="ghost"),
)

MAXIMUM = AttackSpec(
    name="ghost-maximum",
    about="against ghost: takes the token most similar to the substitute",
    source="GHOST, sec. 5.7",
    make=maximum,
    seconds=0.2,
    once=3.0,
    protection=True,
    home=Home(defense="ghost"),
)

MEDIAN = AttackSpec(
    name="ghost-median",
    about="against ghost: takes the token of median similarity",
    source="GHOST, sec. 5.7",
    make=median,
    seconds=0.2,
    once=3.0,
    protection=True,
    home=Home(defense="ghost"),
)

MEAN = AttackSpec(
    name="ghost-mean",
    about="against ghost: takes the token nearest to the mean of all possible originals",
    source="GHOST, sec. 5.7",
    make=mean,
    seconds=0.2,
    once=3.0,
    protection=True,
    home=Home(defense="ghost"),
)
