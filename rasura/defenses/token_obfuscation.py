"""GHOST (Feng et al. 2026): every token gives way to one that lies near it and means something else, before training.

The search for shadow tokens is in ``rasura.shadows``; here is the selection (sec. 3.4, Algorithm 2) and the transform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rasura.interfaces import InputError, Transform
from rasura.shadows.table import PAPER, RELAXED, ShadowSettings, ShadowTable, embedding_digest, made_for, token_embedding
from rasura.values import Batch, Mechanism, Stage, Vocabulary

TOGETHER = 8192
"""Token positions that run through the model at once."""


@dataclass(frozen=True)
class Selection:
    """How shadow tokens are chosen: the ``beam`` best texts are kept, ``tried`` candidates a place are run through the model
    (0: all, as in the paper), and sweeps over the text end when one improves the error by less than the fraction ``enough``
    or after ``sweeps``.

    The paper stops on an absolute change, which longer texts dilute, and inside the sweep; here on a relative one, after it.
    """

    beam: int = 1
    tried: int = 12
    sweeps: int = 4
    enough: float = 0.01

    def __post_init__(self) -> None:
        if self.beam < 1 or self.tried < 0 or self.sweeps < 1 or not 0 <= self.enough < 1:
            raise InputError(f"ghost: beam {self.beam}, tried {self.tried}, sweeps {self.sweeps}, enough {self.enough}")


DEFAULT = Selection()


@dataclass(frozen=True)
class Obfuscated:
    """One text: its ``ids``; ``error``: mean squared difference of the hidden states; ``weak``: places whose substitute
    broke a criterion, with what was given up; ``kept``: places without any substitute, where the private token stands."""

    ids: tuple[int, ...]
    error: float
    weak: dict[int, str] = field(default_factory=dict)
    kept: tuple[int, ...] = ()


class Selector:
    """Chooses shadow tokens that leave the hidden states of all layers, the embedding's included, as they were.

    ``model``: a Hugging Face model, encoder or decoder, in any mode; ``table``: its shadow tokens; ``fixed``: tokens that
    stay, special ones for a start. Raises ``InputError`` where the table was made for another embedding.
    """

    def __init__(self, model: nn.Module, table: ShadowTable, fixed: frozenset[int], settings: Selection = DEFAULT) -> None:
        base: Any = getattr(model, "base_model", model)
        self.base, self.table, self.fixed, self.settings = base, table, fixed, settings
        self.embedding = token_embedding(model)
        if embedding_digest(self.embedding) != table.model:
            raise InputError("the shadow table was made for another model; make one for this model")

    def __call__(self, texts: Sequence[Sequence[int]], rng: Generator) -> list[Obfuscated]:
        """Obfuscate ``texts`` (ids, special tokens included), those of one length together."""
        buckets: dict[int, list[int]] = defaultdict(list)
        for row, text in enumerate(texts):
            buckets[len(text)].append(row)
        out: list[Obfuscated] = [Obfuscated((), 0.0)] * len(texts)
        training = self.base.training
        self.base.eval()
        try:
            for length, rows in sorted(buckets.items()):
                size = max(1, TOGETHER // (length * max(self.settings.tried, 8)))
                for start in range(0, len(rows), size):
                    some = rows[start : start + size]
                    for row, done in zip(some, self._bucket([list(texts[r]) for r in some], rng)):
                        out[row] = done
        finally:
            self.base.train(training)
        return out

    def _bucket(self, texts: list[list[int]], rng: Generator) -> list[Obfuscated]:
        """Texts of one length."""
        original = torch.tensor(texts)
        with torch.no_grad():
            goal = self._states(self._embedded(original))
        options = [[self._options(token) for token in text] for text in texts]
        beams: list[dict[tuple[int, ...], float]] = []
        for text, places in zip(texts, options):
            start = [int(o[torch.randint(len(o), (1,), generator=rng)]) if len(o) else t for t, o in zip(text, places)]
            beams.append({tuple(start): float("inf")})
        beams = self._scored(beams, goal)
        alive = set(range(len(texts)))
        for _ in range(self.settings.sweeps):
            before = [min(b.values()) for b in beams]
            for place in range(original.shape[1]):
                moving = [r for r in sorted(alive) if len(options[r][place])]
                if moving:
                    found = self._moved(
                        [beams[r] for r in moving], [options[r][place] for r in moving], place, goal[:, moving]
                    )
                    for r, beam in zip(moving, found):
                        beams[r] = beam
            alive = {r for r in alive if min(beams[r].values()) < (1 - self.settings.enough) * before[r]}
            if not alive:
                break
        return [self._told(text, beam) for text, beam in zip(texts, beams)]

    def _options(self, token: int) -> Tensor:
        return torch.empty(0, dtype=torch.int64) if token in self.fixed else self.table.of(token)

    def _told(self, text: Sequence[int], beam: dict[tuple[int, ...], float]) -> Obfuscated:
        ids, error = min(beam.items(), key=lambda item: item[1])
        weak, kept = {}, []
        for place, token in enumerate(text):
            code = int(self.table.relaxed[token])
            if token in self.fixed:
                continue
            if not len(self.table.of(token)):
                kept.append(place)
            elif code:
                weak[place] = RELAXED[code]
        return Obfuscated(ids, error, weak, tuple(kept))

    def _moved(
        self, beams: list[dict[tuple[int, ...], float]], options: list[Tensor], place: int, goal: Tensor
    ) -> list[dict[tuple[int, ...], float]]:
        """Each beam with the candidates of ``place`` tried; the best of all texts stay."""
        slopes = self._slopes(beams, place, goal) if self.settings.tried else None
        tried: list[dict[tuple[int, ...], float]] = []
        for row, (beam, candidates) in enumerate(zip(beams, options)):
            texts: dict[tuple[int, ...], float] = dict(beam)
            for number, text in enumerate(beam):
                some = candidates
                if slopes is not None and len(candidates) > self.settings.tried:
                    gain = (self.embedding[candidates] - self.embedding[text[place]]) @ slopes[row, number]
                    some = candidates[gain.argsort()[: self.settings.tried]]
                for token in some.tolist():
                    texts.setdefault((*text[:place], token, *text[place + 1 :]), float("nan"))
            tried.append(texts)
        scored = self._scored(tried, goal)
        best = [sorted(texts.items(), key=lambda item: item[1])[: self.settings.beam] for texts in scored]
        return [dict(items) for items in best]

    def _scored(self, beams: list[dict[tuple[int, ...], float]], goal: Tensor) -> list[dict[tuple[int, ...], float]]:
        """``beams`` with the error of those texts that have none yet."""
        todo = [(row, text) for row, beam in enumerate(beams) for text, error in beam.items() if not error < float("inf")]
        out = [dict(beam) for beam in beams]
        size = max(1, TOGETHER // goal.shape[2])
        for start in range(0, len(todo), size):
            some = todo[start : start + size]
            with torch.no_grad():
                states = self._states(self._embedded(torch.tensor([text for _, text in some])))
            errors = self._errors(states, goal[:, [row for row, _ in some]])
            for (row, text), error in zip(some, errors.tolist()):
                out[row][text] = error
        return out

    def _slopes(self, beams: list[dict[tuple[int, ...], float]], place: int, goal: Tensor) -> Tensor:
        """How the error of each text changes with the embedding at ``place``: ``(rows, beam, hidden)``."""
        widest = max(map(len, beams))
        out = torch.zeros(len(beams), widest, self.embedding.shape[1])
        for k in range(widest):
            rows = [r for r, beam in enumerate(beams) if len(beam) > k]
            e = self._embedded(torch.tensor([list(beams[r])[k] for r in rows])).requires_grad_(True)
            error = self._errors(self._states(e), goal[:, rows]).sum()
            (slope,) = torch.autograd.grad(error, e)
            out[rows, k] = slope[:, place]
        return out

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.base.get_input_embeddings()(ids).detach()  # type: ignore[no-any-return]

    def _states(self, embedded: Tensor) -> Tensor:
        """Hidden states of all layers for texts without padding: ``(layers, texts, length, hidden)``."""
        mask = torch.ones(embedded.shape[:2], dtype=torch.long)
        found = self.base(inputs_embeds=embedded, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return torch.stack(found.hidden_states)

    @staticmethod
    def _errors(states: Tensor, goal: Tensor) -> Tensor:
        """Mean squared difference over layers, places and hidden dimensions of each text."""
        return (states - goal).square().mean((0, 2, 3))


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
