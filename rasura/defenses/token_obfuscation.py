"""GHOST (Feng et al. 2026): every token gives way to one that lies near it and means something else, before training.

The search for shadow tokens and their selection are in ``rasura.shadows``; here is the transform.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Generator, nn

from rasura.interfaces import Transform
from rasura.shadows.selection import DEFAULT, Selection, Selector
from rasura.shadows.table import PAPER, ShadowSettings, ShadowTable, made_for
from rasura.values import Batch, Mechanism, Stage, Vocabulary


def ghost(
    table: ShadowTable | None = None, shadows: ShadowSettings = PAPER, selection: Selection = DEFAULT
) -> Transform[Batch, Batch, Selector]:
    """GHOST on a batch: its ids become shadow tokens, labels stay; a causal model's targets become the obfuscated ids.

    Made for training, where evaluation is on original text. The state is the table of shadow tokens, searched for at the
    first use of a model unless ``table`` is given.
    """

    def init(known: tuple[nn.Module, Vocabulary]) -> Selector:
        model, vocabulary = known
        found = table or made_for(model, vocabulary, shadows)
        return Selector(model, found, vocabulary.special_ids, selection)

    def apply(batch: Batch, state: Selector, rng: Generator) -> tuple[Batch, Selector]:
        done = state([batch.ids(row) for row in range(len(batch))], rng)
        ids = batch.input_ids.clone()
        for row, text in enumerate(done):
            ids[row, batch.attention_mask[row].bool()] = torch.tensor(text.ids)
        labels = batch.labels
        if labels.dim() == 2:
            labels = torch.where(labels == -100, labels, ids)
        return replace(batch, input_ids=ids, labels=labels), state

    settings = shadows if table is None else table.settings
    known = {**asdict(settings), "beam": selection.beam}
    return Transform(Stage.DATA, Mechanism("ghost", Stage.DATA, known), init, apply)


def balanced(group: int) -> Transform[Batch, Batch, Selector]:
    """GHOST whose every substitute stands for ``group`` tokens alike (ours): what is sent depends on the groups alone."""
    return ghost(shadows=replace(PAPER, group=group))
