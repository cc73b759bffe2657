"""GHOST for the texts of one model: ``GhostObfuscator``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rasura.core.files import check_writable
from rasura.core.given import of_kind
from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.data.text import Example, place_of
from rasura.ghost.defense import ghost
from rasura.ghost.models import made_for, searchable
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import PAPER, ShadowSettings, ShadowTable, embedding_digest, token_embedding
from rasura.victims.loading import Victim

PLACES = ("weak", "unchanged", "kept")
"""What is said of a text by position."""


class GhostObfuscator:
    """GHOST for the texts of one model: ``data.map(GhostObfuscator(load("minilm", "classification")), batched=True)``.

    ``shadows``: the settings, or some of them by name; None for those of ``table``, or the paper's without a table.
    ``table``: a file of shadow tokens, which is written if it does not exist. Raises ``InputError`` for a table of another
    model, for a table with other settings than requested, and where it cannot be written.
    """

    def __init__(
        self,
        victim: Victim,
        *,
        table: str | Path | None = None,
        shadows: ShadowSettings | Mapping[str, Any] | None = None,
        beam: int = 1,
    ) -> None:
        victim = of_kind(victim, Victim, "victim", 'a folder or hub id is rasura.load("my-model", "classification")')
        self.victim, model = victim, searchable(victim.model)
        asked = asdict(shadows) if isinstance(shadows, ShadowSettings) else dict(shadows or {})
        made: ShadowTable | None = None
        if table is not None and Path(table).exists():
            made = ShadowTable.load(table, embedding_digest(token_embedding(model)))
            if differs := made.differs(asked):
                raise InputError(
                    f"{table} was made with other settings ({differs}); request the same settings, or name another file"
                )
        elif table is not None:
            check_writable(table)
        shadows = replace(PAPER, **asked) if made is None else made.settings
        self.table = made or made_for(model, victim.vocabulary, shadows)
        if table is not None and made is None:
            self.table.save(table)
        self.selector = ghost(self.table, shadows, Selection(beam=beam)).init((model, victim.vocabulary))

    def __call__(self, rows: Mapping[str, Any], *, seed: int = 0, name: str = "map") -> dict[str, Any]:
        """The columns ``text`` (and ``text_pair``) of ``rows`` obfuscated, with their ``input_ids``: for a pair, the ids of
        both texts in the form that the model takes, and ``token_type_ids`` if the model uses them. One row, as ``map`` gives
        it without ``batched``, is returned as one."""
        if isinstance(rows["text"], str | None):
            return {n: v[0] for n, v in self({n: [v] for n, v in rows.items()}, seed=seed, name=name).items()}
        pairs = rows.get("text_pair")
        examples = [Example(t or "", p) for t, p in zip(rows["text"], pairs or [None] * len(rows["text"]))]
        done = self.examples(examples, seed, (f"{name}/text", f"{name}/text_pair"))
        alone = [(e, one) for e, one in zip(examples, done) if pairs is not None and not e.text_pair]
        for example, one in alone:  # rows with a second text and without have the same columns
            if (types := self._together(example, one["input_ids"], [])[1]) is not None:
                one["token_type_ids"] = types
        names = ["text", "input_ids", *(["text_pair"] if pairs is not None else [])]
        names += ["token_type_ids"] if any("token_type_ids" in d for d in done) else []
        return {n: [d.get(n) for d in done] for n in names}

    def examples(self, examples: Sequence[Example], seed: int, names: tuple[str, str]) -> list[dict[str, Any]]:
        """Each example as a dictionary: ``text``, ``input_ids``, ``weak`` (position: the criterion that was given up),
        ``unchanged``, ``kept``, ``error``; for pairs also ``text_pair``, and each of these lists with ``_pair`` behind its
        name, and the ids of both texts.
        ``names``: names of the random streams."""
        self.check(examples)
        rows = self.texts([e.text for e in examples], seed, names[0])
        if not any(e.text_pair for e in examples):
            return rows
        seconds = self.texts([e.text_pair or "" for e in examples], seed, names[1])
        for example, row, second in zip(examples, rows, seconds):
            ids, types = self._together(example, row["input_ids"], second["input_ids"])
            row["input_ids"] = ids
            if types is not None:
                row["token_type_ids"] = types
            if example.text_pair:
                row |= {"text_pair": second["text"], **{f"{name}_pair": second[name] for name in PLACES}}
                row["tokens"] += second["tokens"]
                row["error"] = (row["error"] + second["error"]) / 2
        return rows

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ``InputError``, with the row, for an example that the model cannot take; a pair counts as a whole."""
        max_length = self.victim.max_length
        for number, e in enumerate(examples, 1):
            ids = self.victim.tokenizer(e.text, e.text_pair or None)["input_ids"]
            if len(ids) > max_length:
                raise InputError(
                    f"{place_of(e, number)}: the text has {len(ids)} tokens, the model takes {max_length}; split it"
                )

    def _together(self, example: Example, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """The substitutes of both texts of a pair at the positions of their tokens, in the form that the model takes."""
        tokenizer, words = self.victim.tokenizer, self.victim.vocabulary
        coded = tokenizer(example.text, example.text_pair or None)
        ids, types = list(coded["input_ids"]), coded.get("token_type_ids")
        if not example.text_pair:
            return list(first), types
        start = 0
        for text, new in ((example.text, first), (example.text_pair, second)):
            inner = slice(len(words.prefix), len(new) - len(words.suffix))
            old, chosen = list(tokenizer(text)["input_ids"])[inner], list(new)[inner]
            places = [k for k in range(start, len(ids) - len(old) + 1) if ids[k : k + len(old)] == old]
            if not places:
                raise InputError(
                    f"{place_of(example, 1)}: the tokens of the pair differ from those of its two texts alone; split it"
                )
            start = places[0] + len(old)
            ids[places[0] : start] = chosen
        return ids, types

    def texts(self, texts: Sequence[str], seed: int, name: str) -> list[dict[str, Any]]:
        """Each text as a dictionary: ``text``, ``input_ids``, ``weak`` (position: the criterion that was given up),
        ``unchanged`` (positions of private tokens that still stand there) and those of them without a substitute
        (``kept``), ``error``."""
        tokenizer = self.victim.tokenizer
        coded = [tokenizer(text)["input_ids"] if text else [] for text in texts]
        done = self.selector([ids for ids in coded if ids], generator(seed, "ghost", name))
        found = iter(done)
        out = []
        for ids in coded:
            one = next(found) if ids else None
            read = list(one.ids) if one else []
            own = [k for k, token in enumerate(ids) if token not in self.victim.vocabulary.special_ids]
            out.append({
                "text": self.victim.vocabulary.text(read), "input_ids": read, "weak": dict(one.weak) if one else {},
                "unchanged": [k for k in own if read[k] == ids[k]], "kept": list(one.kept) if one else [],
                "error": one.error if one else 0.0, "tokens": len(own),
            })  # fmt: skip
        return out
