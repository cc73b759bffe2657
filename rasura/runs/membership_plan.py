"""Which attacks on a trained model are to be run, checked before anything runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import get_args

from rasura.core.interfaces import Defense, InputError
from rasura.core.options import known
from rasura.core.values import Task
from rasura.metrics.membership import auc_bound, needed
from rasura.registry import MEMBERSHIP, parse_defense
from rasura.victims.recipe import Recipe


@dataclass(frozen=True)
class MembershipPlan:
    """Which attacks tell ``members`` from ``non_members`` (files of texts with labels) of the trained ``model``.

    ``rows``: the ``rows.json`` that a training left, which names the rows of ``members`` that it trained on; those that it
    held out are the others then, where ``non_members`` is None.
    ``base``: the public model that training began with. ``defense``, ``recipe``: how the model was trained, which the
    adversary imitates in ``shadow_models`` models, each on a random half of the candidates and of ``reference``, a file of
    other texts. ``fprs``: false positive rates; empty for those of 1 % and .1 % that the number of texts allows.
    ``epsilon``, ``delta``: a guarantee that the figures are held against. ``limit``: texts of each side.
    ``text_column``, ``pair_column``, ``label_column``: where the files have unusual names for them. Labels that are text
    stand for the model's classes of the same names.
    """

    model: str
    members: str
    non_members: str | None = None
    rows: str | None = None
    base: str = "minilm"
    task: str = "classification"
    attacks: tuple[str, ...] = tuple(MEMBERSHIP)
    reference: str | None = None
    defense: str = "none"
    shadow_models: int = 8
    fprs: tuple[float, ...] = ()
    epsilon: float | None = None
    delta: float = 0.0
    limit: int | None = None
    num_labels: int | None = None
    truncate: bool = False
    max_length: int | None = None
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=5))

    @cached_property
    def parts(self) -> Defense:
        """What ``defense`` does in a training, parsed once."""
        return parse_defense(self.defense)

    def checked(self) -> MembershipPlan:
        """This plan, or ``InputError`` for what is wrong with it."""
        known("task", self.task, [t for t in get_args(Task) if t != "vision"])
        _ = self.parts
        if self.non_members is None and self.rows is None:
            raise InputError("no texts that the model was not trained on; pass --non-members, or --rows of a training")
        if not self.attacks:
            raise InputError(f"no attack given; expected at least one of {', '.join(MEMBERSHIP)}")
        for name in self.attacks:
            known("membership attack", name, MEMBERSHIP)
        if self.shadow_models < 2 or self.shadow_models % 2:
            raise InputError(
                f"shadow models: {self.shadow_models}; expected an even number of at least 2: each text is in half of them"
            )
        if self.limit is not None and self.limit < 2:
            raise InputError(f"limit is {self.limit}; expected at least 2 texts of each side")
        for fpr in self.fprs:
            needed(fpr)
        if self.epsilon is not None:
            auc_bound(self.epsilon, self.delta)
        elif self.delta:
            raise InputError(f"delta is {self.delta} without an epsilon; pass --epsilon, too")
        return self


def classes_of(model: str) -> int | None:
    """How many classes a folder's classifier has; None where the folder does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    try:
        labels = json.loads(path.read_text(encoding="utf-8")).get("id2label")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise InputError(f"{path} is no JSON object; expected the config.json of a model") from None
    return len(labels) if isinstance(labels, dict) and labels else None
