"""GHOST (Feng et al. 2026): before training, every token is replaced by one that is near it and means something else.

The search for shadow tokens and their selection are in ``rasura.ghost``; here is the transform.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import nn

from rasura.core.batches import Batch
from rasura.core.interfaces import Transform, made
from rasura.core.mechanisms import mechanism
from rasura.core.options import options
from rasura.core.rng import Randomness
from rasura.core.specs import TEXT, DefenseSpec, Strength
from rasura.core.values import Stage, Vocabulary
from rasura.ghost.models import made_for, searchable
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import DEFAULT, Selection
from rasura.ghost.table import PAPER, ShadowSettings, ShadowTable, embedding_digest, token_embedding
from rasura.ghost.words import lemmatizer


def ghost(
    table: ShadowTable | None = None, shadows: ShadowSettings = PAPER, selection: Selection = DEFAULT
) -> Transform[Batch, Batch, Selector]:
    """GHOST on a batch: its ids become shadow tokens, labels stay; a causal model's targets become the obfuscated ids.

    Made for training, where evaluation is on original text. The state is the table of shadow tokens, searched for at the
    first use of a model unless ``table`` is given.
    """

    def init(known: tuple[nn.Module, Vocabulary]) -> Selector:
        model, vocabulary = searchable(known[0]), known[1]
        digest = embedding_digest(token_embedding(model))
        found = table or made_for(model, vocabulary, shadows, digest)
        found.check_tokenizer(vocabulary)
        return Selector(model, found, vocabulary.marks, selection, digest)

    def apply(batch: Batch, state: Selector, rng: Randomness) -> tuple[Batch, Selector]:
        done = state([batch.ids(row) for row in range(len(batch))], rng)
        ids = batch.input_ids.clone()
        for row, text in enumerate(done):
            ids[row, batch.attention_mask[row].bool()] = torch.tensor(text.ids, device=ids.device)
        labels = batch.labels
        if labels.dim() == 2:
            labels = torch.where(labels == -100, labels, ids)
        return replace(batch, input_ids=ids, labels=labels), state

    settings = shadows if table is None else table.settings
    if table is None and settings.language is not None:
        lemmatizer()  # What is missing is said now, not when the first text comes.
    known = {**asdict(settings), **asdict(selection)}
    return made(Stage.DATA, mechanism("ghost", known), init, apply)


def described(text: str = "") -> Transform[Batch, Batch, Selector]:
    """GHOST with options as text: ``group=8``, ``k=30/overlap=0.2/lemma=false``, ``start=random/sweeps=0``; the names are
    those of ``ShadowSettings`` and ``Selection``. Raises ``InputError`` for unknown names and invalid values."""
    wanted = options("ghost", text, {**asdict(PAPER), **asdict(DEFAULT)})
    shadows = {n: v for n, v in wanted.items() if n in ShadowSettings.__dataclass_fields__}
    if shadows.get("k", 0) > PAPER.max_k:
        shadows.setdefault("max_k", shadows["k"])
    selection = {n: v for n, v in wanted.items() if n not in shadows}
    return ghost(shadows=ShadowSettings(**shadows), selection=Selection(**selection))


SPEC = DefenseSpec(
    name="ghost",
    about="replaces tokens by nearby tokens with a different meaning; balanced: ghost:group=8",
    source="GHOST, sec. 3.3 and 3.4, Algorithm 1",
    make=described,
    example="ghost",
    parameter=str,
    tasks=TEXT,
    known_by=("ghost-lattice", "ghost-generation"),
    strength=Strength(name="group", weakest=1, strongest=32, points=6, whole=True, keys=("group",)),
    draws=True,
    seconds=1.0,
)
