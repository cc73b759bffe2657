"""GHOST's search (Feng et al. 2026, sec. 3.3, Algorithm 1): for every token, the near tokens with another meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.files import write_whole
from rasura.core.interfaces import InputError
from rasura.core.values import Vocabulary
from rasura.core.vocabulary import tokenizer_digest
from rasura.core.word_rows import token_rows
from rasura.ghost.neighbours import common, neighbours
from rasura.ghost.words import bare

RELAXED = ("none", "overlap", "overlap and mutual neighbours", "no substitute", "kept by policy")
"""By code in the table: the criterion that was given up for a token without any neighbour left at
``ShadowSettings.max_k``."""

NONE, POLICY = RELAXED.index("no substitute"), RELAXED.index("kept by policy")

SCHEMA = 7

TENSORS = ("offsets", "ids", "k", "relaxed", "groups")
"""The tensors of a table's file."""


@dataclass(frozen=True)
class ShadowSettings:
    """The ``k`` nearest neighbours of a token are candidates. A candidate is kept if it shares at most the fraction
    ``overlap`` of its neighbours with the token, does not have the token among its own neighbours, and has another lemma
    (paper: 70 and 0.1, sec. 6.1). If none is left, ``k`` grows by ``grow`` up to ``max_k``; then first the overlap and then
    mutual neighbours are allowed, which the table records for every token. The paper grows without limit. ``language``: the
    language of the lemmas; None for no lemmas. ``direct``, ``indirect``, ``lemma``: the three criteria, for ablation.

    Ours: with ``group`` above 1, that many tokens of similar frequency share one set of ``choices`` substitutes (see
    ``ghost.groups``); ``keep_punctuation`` and ``keep_numbers`` leave those tokens unchanged; ``round_trip`` uses only
    substitutes that survive a round trip through text and tokenizer.
    """

    k: int = 70
    overlap: float = 0.1
    grow: int = 10
    max_k: int = 170
    language: str | None = "en"
    direct: bool = True
    indirect: bool = True
    lemma: bool = True
    group: int = 1
    choices: int = 32
    keep_punctuation: bool = False
    keep_numbers: bool = False
    round_trip: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.k <= self.max_k and self.grow > 0 and 0 <= self.overlap <= 1):
            raise InputError(
                f"ghost: k is {self.k}, up to {self.max_k} by {self.grow}, overlap {self.overlap}; expected 0 < k <= max_k, "
                "a step above 0 and an overlap between 0 and 1"
            )
        if self.group < 1 or self.choices < 1:
            raise InputError(f"ghost: groups of {self.group} tokens and {self.choices} choices; expected at least 1 of both")


PAPER = ShadowSettings()
"""The paper's settings."""


@dataclass(frozen=True, eq=False)
class ShadowTable:
    """The shadow tokens of every token: those of ``t`` are ``ids[offsets[t] : offsets[t + 1]]``, nearest first.

    ``k`` ``(tokens,)``: neighbours that were needed; ``relaxed`` ``(tokens,)``: index into ``RELAXED``; ``groups``
    ``(tokens,)``: tokens of one number share their substitutes. ``model``, ``tokenizer``: digests of the
    embedding and of the vocabulary that it was made for.
    """

    offsets: Tensor
    ids: Tensor
    k: Tensor
    relaxed: Tensor
    groups: Tensor
    settings: ShadowSettings
    model: str
    tokenizer: str = ""

    def of(self, token: int) -> Tensor:
        """The shadow tokens of ``token``, int64; empty where it has none."""
        return self.ids[int(self.offsets[token]) : int(self.offsets[token + 1])].long()

    def given_up(self, token: int) -> int:
        """The index into ``RELAXED`` of ``token``; with groups, the largest of its group, whose substitutes they share."""
        return int(self.relaxed[self.groups == self.groups[token]].max())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with the settings in its header, completely or not at all. Raises ``InputError`` where
        it cannot be written."""
        from safetensors.torch import save

        tensors = {n: getattr(self, n).contiguous() for n in TENSORS}
        made_for = {"model": self.model, "tokenizer": self.tokenizer}
        about = {"schema": str(SCHEMA), "settings": json.dumps(asdict(self.settings)), **made_for}
        write_whole(path, save(tensors, metadata=about), private=False)

    @classmethod
    def load(cls, path: str | Path, model: str | None = None) -> ShadowTable:
        """Read a file of ``save``. Raises ``InputError`` for any other file, and for a table of another ``model``."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                about: dict[str, Any] = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is not a shadow table: {error}") from None
        if about.get("schema") != str(SCHEMA) or set(found) != set(TENSORS):
            raise InputError(f"{path} is not a shadow table of this version; make a new one with rasura protect ghost")
        try:
            told = json.loads(about["settings"])
            usual = asdict(PAPER)
            if told.keys() != usual.keys() or not all(_alike(told[name], usual[name]) for name in usual):
                raise ValueError
            settings = ShadowSettings(**told)
            made = cls(**found, settings=settings, model=str(about["model"]), tokenizer=str(about["tokenizer"]))
        except (KeyError, ValueError, RecursionError):
            raise InputError(f"{path} is damaged: its settings cannot be read; make a new one") from None
        if model is not None and made.model != model:
            raise InputError(f"{path} was made for another model; make one for this model with rasura protect ghost")
        made._check(path)
        return made

    def _check(self, path: str | Path) -> None:
        """Raises ``InputError`` where the tensors cannot be a table's."""
        bounds, count = self.offsets, len(self.offsets) - 1
        kinds = (torch.int8, torch.int16, torch.int32, torch.int64)
        whole = all(t.dim() == 1 and t.dtype in kinds for t in (getattr(self, name) for name in TENSORS))
        fits = whole and count > 0 and all(len(t) == count for t in (self.k, self.relaxed, self.groups))
        fits = fits and int(bounds[0]) == 0 and int(bounds[-1]) == len(self.ids) and bool((bounds.diff() >= 0).all())
        for tensor, size in ((self.ids, count), (self.groups, count), (self.relaxed, len(RELAXED))):
            fits = fits and (not len(tensor) or (int(tensor.min()) >= 0 and int(tensor.max()) < size))
        if not fits:
            raise InputError(f"{path} is damaged: its tensors are not those of a shadow table; make a new one")

    def check_tokenizer(self, vocabulary: Vocabulary) -> None:
        """Raises ``InputError`` where the table was made for another tokenizer, as the same ids may be other words, and
        where it replaces control tokens, as tables of earlier versions do."""
        if self.tokenizer != tokenizer_digest(vocabulary):
            raise InputError("the shadow table was made for another tokenizer; make one for this tokenizer")
        if any(len(self.of(i)) for i in vocabulary.control_ids if i < len(self)):
            raise InputError("the shadow table replaces control tokens of this tokenizer; make a new one")

    def differs(self, asked: Mapping[str, Any]) -> str:
        """Which settings ``asked`` differ from the table's, in words; empty where none does."""
        own = asdict(self.settings)
        return ", ".join(f"{name} {own[name]}, requested {value}" for name, value in asked.items() if own[name] != value)


def _alike(value: Any, usual: Any) -> bool:
    return type(value) is type(usual) or (value is None and isinstance(usual, str))


def token_embedding(model: nn.Module) -> Tensor:
    """The word embedding of a Hugging Face ``model``: ``(tokens, hidden)``, without gradient."""
    return token_rows(getattr(model, "base_model", model))


def embedding_digest(table: Tensor) -> str:
    """What tells an embedding ``(tokens, hidden)`` from others: a hash of its shape and numbers."""
    rows = table.detach().float().cpu().contiguous()
    return hashlib.sha256(str(tuple(rows.shape)).encode() + rows.numpy().tobytes()).hexdigest()[:32]


def usable_tokens(vocabulary: Vocabulary) -> Tensor:
    """Tokens that stand for words of a text: no special, control or unused ones; bool, ``(tokens,)``."""
    out = torch.ones(vocabulary.size, dtype=torch.bool)
    out[[i for i in vocabulary.wordless if i < vocabulary.size]] = False
    return out


def kept_by_policy(words: Sequence[str], settings: ShadowSettings) -> Tensor:
    """Which tokens, by their text, the ``settings`` leave alone; bool, ``(tokens,)``."""
    own = [bare(word) for word in words]
    marks = [settings.keep_punctuation and bool(w) and not any(c.isalnum() for c in w) for w in own]
    numbers = [settings.keep_numbers and any(c.isdigit() for c in w) for w in own]
    return torch.tensor([a or b for a, b in zip(marks, numbers)])


def read_as_written(vocabulary: Vocabulary) -> Tensor:
    """Which tokens stay what they are when text is made of them and tokenized again; bool, ``(tokens,)``."""
    out = torch.zeros(vocabulary.size, dtype=torch.bool)
    for token in usable_tokens(vocabulary).nonzero().flatten().tolist():
        word = vocabulary.decode([token]).strip()
        # Between two others, since what joins them is the tokenizer's own way.
        out[token] = word.isalnum() and vocabulary.encode(vocabulary.decode([token] * 3)) == [token] * 3
    return out


def search(
    table: Tensor, names: Sequence[str], usable: Tensor, settings: ShadowSettings, allowed_ids: Tensor | None = None
) -> ShadowTable:
    """The shadow tokens of every ``usable`` token of ``table`` ``(tokens, hidden)``; ``names``: each token's lemma;
    ``allowed_ids``: bool, ``(tokens,)``, which of them may be substitutes, None for all.

    Departures from the printed algorithm, which contradicts its own text: a neighbour is removed as soon as any one
    criterion holds; the check that none is left comes after the loop over the neighbours; and ``overlap`` is a fraction of
    ``k``.
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    lemma = torch.tensor([number[name] for name in names])
    max_k = min(settings.max_k, int(usable.sum()) - 1)
    near = neighbours(table, max_k, usable)
    wide = near.long()
    count = len(near)
    kept: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * count
    needed = torch.zeros(count, dtype=torch.int16)
    relaxed = torch.full((count,), NONE, dtype=torch.int8)
    rows = usable.nonzero().flatten()
    # What lemma or mutual neighbours exclude at one k they exclude at every larger one.
    other = (
        lemma[near[rows].long()] != lemma[rows][:, None]
        if settings.lemma
        else torch.ones(len(rows), max_k, dtype=torch.bool)
    )
    if allowed_ids is not None:
        other &= allowed_ids[near[rows].long()]
    one_way = other.clone()
    sizes = [*range(min(settings.k, max_k), max_k, settings.grow), max_k]
    for level, k in [(0, k) for k in sizes] + [(1, max_k), (2, max_k)]:
        allowed = (one_way if level < 2 else other)[:, :k].clone()
        if level == 0 and (settings.direct or settings.indirect):
            shared, back = common(wide[:, :k], rows, allowed)
            if settings.direct:
                one_way[:, :k] &= ~back
                allowed &= ~back
            if settings.indirect:
                allowed &= shared <= settings.overlap * k
        has = allowed.any(1)
        found = near[rows[has], :k][allowed[has]]
        for row, part in zip(rows[has].tolist(), torch.split(found, allowed[has].sum(1).tolist())):
            kept[row] = part
        needed[rows[has]], relaxed[rows[has]] = k, level
        rows, other, one_way = rows[~has], other[~has], one_way[~has]
        if not len(rows):
            break
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(ids) for ids in kept]).cumsum(0)
    alone = torch.arange(count, dtype=torch.int32)
    return ShadowTable(offsets, torch.cat(kept), needed, relaxed, alone, settings, embedding_digest(table))
