"""GHOST read back by a model that learned it: trained on reference texts and what GHOST makes of them.

After the "LLM generation" of Feng et al. 2026 (sec. 5.7, app. A.2), who fine-tune Llama-3.2-3B to write the original of
an obfuscated text. Substitutes stand where their originals stood, so here the public model itself learns to name the
original at each place, in one pass. ``ghost-generation`` chooses among the substitute's preimages;
``ghost-generation-free`` among all tokens, as the paper's model does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.ghost.inversion import Preimages, announced_ghost, preimages_of, substitutes
from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import generator, seeded
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import Grant, Observation, Reconstruction, Vocabulary
from rasura.ghost.models import made_for
from rasura.ghost.selection import Selector
from rasura.ghost.table import ShadowTable, token_embedding
from rasura.victims.fingerprint import fingerprint

LONGEST = 64
"""Tokens of a reference text that is learned from."""

BATCH = 16
RATE = 2e-4

KEPT = 3
"""Trained models that are kept, as an audit of several settings asks for them in turn."""


class Restorer(nn.Module):
    """Names the original token at every place of an obfuscated text: the public model, a linear layer that starts as the
    identity, and the model's own embedding as the output layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base: Any = copy.deepcopy(getattr(model, "base_model", model)).requires_grad_(True)
        self.names = token_embedding(model).clone()
        self.turn = nn.Linear(self.names.shape[1], self.names.shape[1])
        nn.init.eye_(self.turn.weight)
        nn.init.zeros_(self.turn.bias)

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """Logits ``(n, tokens)`` at the ``n`` true ``places`` ``(batch, length)``."""
        states = self.base(input_ids=ids, attention_mask=mask).last_hidden_state
        out: Tensor = self.turn(states[places]) @ self.names.T
        return out


def trained(
    model: nn.Module, table: ShadowTable, vocabulary: Vocabulary, texts: Sequence[str], epochs: int, seed: int
) -> Restorer:
    """A ``Restorer`` that learned from ``texts`` and what GHOST with ``table`` makes of them."""
    coded = [[*vocabulary.prefix, *vocabulary.encode(t), *vocabulary.suffix] for t in texts]
    originals = [ids for ids in coded if len(vocabulary.prefix) + len(vocabulary.suffix) < len(ids) <= LONGEST]
    if not originals:
        raise AttackFailed(f"no reference text has 1 to {LONGEST} tokens to learn from")
    hidden = Selector(model, table, vocabulary.special_ids)(originals, generator(seed, "ghost"))
    pairs = [(done.ids, tuple(ids)) for done, ids in zip(hidden, originals)]
    with seeded(seed):
        restorer = Restorer(model).eval()
        optimizer = torch.optim.AdamW(restorer.parameters(), lr=RATE)
        for epoch in range(epochs):
            order = torch.randperm(len(pairs), generator=generator(seed, "order", epoch)).tolist()
            for start in range(0, len(order), BATCH):
                some = [pairs[k] for k in order[start : start + BATCH]]
                ids, mask = _padded([a for a, _ in some], vocabulary.pad_id or 0)
                wanted, _ = _padded([b for _, b in some], -100)
                places = (wanted >= 0) & ~torch.isin(wanted, torch.tensor(sorted(vocabulary.special_ids)))
                with torch.enable_grad():
                    loss = nn.functional.cross_entropy(restorer(ids, mask, places), wanted[places])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return restorer.requires_grad_(False)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*r, *[fill] * (longest - len(r))] for r in rows])
    return ids, torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])


def restored(
    text: Sequence[int], restorer: Restorer, preimages: Preimages, fixed: frozenset[int], *, free: bool = False
) -> tuple[int, ...]:
    """The originals of an obfuscated ``text`` (ids): at each place the likeliest of the substitute's preimages, or of all
    tokens if ``free``. ``fixed`` tokens stay, and at places without a preimage the substitute does."""
    usable = [max(t, 0) for t in text]
    with torch.no_grad():
        ones = torch.ones(1, len(text), dtype=torch.long)
        logits = restorer(torch.tensor([usable]), ones, ones.bool())
    out = []
    for place, token in enumerate(text):
        originals, chances = preimages.of(token) if token >= 0 and token not in fixed else (torch.empty(0), torch.empty(0))
        if not len(originals):
            out.append(token)
            continue
        if free:
            out.append(next(i for i in logits[place].argsort(descending=True).tolist() if i not in fixed))
        else:
            out.append(int(originals[(logits[place, originals].double() + chances.log()).argmax()]))
    return tuple(out)


@dataclass(frozen=True)
class ShadowGeneration:
    """Reads the substitutes with the portfolio, then has a trained model name their originals: among the preimages, or among
    all tokens if ``free``."""

    name: str = "ghost-generation"
    free: bool = False
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL, Grant.MECHANISM, Grant.REFERENCE_TEXT})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.LANGUAGE_MODEL})
    work: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"quick": (32, 2), "default": (512, 6), "paper": (8000, 10)}
    )
    """Budget level -> reference texts learned from, epochs."""

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        settings = announced_ghost(seen)
        read = substitutes(seen, budget)
        table = made_for(seen.model, seen.vocabulary, settings)
        count, epochs = self.work[budget.level]
        key = (fingerprint(seen.model), settings, seen.reference_text[:count], epochs)
        learned: dict[str, float] = {}
        if key not in _TRAINED:
            begun = time.perf_counter()
            while len(_TRAINED) >= KEPT:
                del _TRAINED[next(iter(_TRAINED))]
            _TRAINED[key] = trained(seen.model, table, seen.vocabulary, seen.reference_text[:count], epochs, seed=0)
            learned = {"learning_seconds": time.perf_counter() - begun}  # the cells that follow use the same model
        preimages = preimages_of(table, seen.model)
        fixed = seen.vocabulary.special_ids
        texts = tuple(restored(t, _TRAINED[key], preimages, fixed, free=self.free) for t in read.tokens)
        details = {k: v for k, v in read.details.items() if k != "proof"}
        details |= {"substitutes": read.confidence, "strategy": "generation", **learned}
        return replace(read, tokens=texts, confidence="matched", proof=None, details=details)


_TRAINED: dict[Any, Restorer] = {}
"""The last ones trained: the cells of an audit share them, and their seed is fixed, so the order of the cells does not
matter."""


SPEC = AttackSpec(
    name="ghost-generation",
    about="against ghost: a model trained on reference texts predicts the original tokens",
    source="GHOST, sec. 5.7 and app. A.2",
    make=ShadowGeneration,
    seconds=0.3,
    once=300.0,
    protection=True,
    home=Home(defense="ghost"),
)

FREE = AttackSpec(
    name="ghost-generation-free",
    about="against ghost: the same without knowledge of which tokens a substitute can stand for",
    source="GHOST, sec. 5.7 and app. A.2",
    make=lambda: ShadowGeneration("ghost-generation-free", free=True),
    seconds=0.3,
    once=300.0,
    protection=True,
    home=Home(defense="ghost"),
)
