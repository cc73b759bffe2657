"""GHOST's selection (Feng et al. 2026, sec. 3.4, Algorithm 2): for every token, the substitute that changes the hidden
states least.

It is not among the defenses, since an adversary who knows the method uses the selection as well.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness, integers
from rasura.ghost.selection_settings import DEFAULT, Selection
from rasura.ghost.table import POLICY, RELAXED, ShadowTable, embedding_digest, token_embedding

TOGETHER = 8192
"""Token positions that run through the model at once."""

CURVATURE = 0.5
"""Share of the error's own curvature that predicts a candidate's best: places share the rest. Of 0.1 to 1, on MiniLM."""

Text = tuple[int, ...]


@dataclass(frozen=True)
class Obfuscated:
    """One text: its ``ids``; ``error``: mean squared difference of the hidden states; ``weak``: places whose substitute
    broke a criterion, with what was given up; ``kept``: places without any substitute, where the private token stands.

    Where the table has groups, all of it depends on the groups alone: states are compared with those of the groups' means.
    """

    ids: Text
    error: float
    weak: dict[int, str] = field(default_factory=dict)
    kept: tuple[int, ...] = ()


class Selector:
    """Chooses shadow tokens that preserve the hidden states of all layers, including the embedding's.

    ``model``: a Hugging Face model, encoder or decoder, in any mode; ``table``: its shadow tokens; ``fixed``: tokens that
    are not replaced, including special ones. If the table has groups, every token counts as its group's mean, so the choice
    depends only on the groups. ``digest``: that of the model's embedding, if it was just computed. Raises ``InputError`` if
    the table was made for another embedding.
    """

    def __init__(
        self, model: nn.Module, table: ShadowTable, fixed: frozenset[int], settings: Selection = DEFAULT,
        digest: str | None = None,
    ) -> None:  # fmt: skip
        base: Any = getattr(model, "base_model", model)
        self.base, self.table, self.fixed, self.settings = base, table, fixed, settings
        if (digest or embedding_digest(token_embedding(model))) != table.model:
            raise InputError("the shadow table was made for another model; make one for this model")
        self._centre = lru_cache(maxsize=None)(self._mean_of_group)
        self.given_up = lru_cache(maxsize=None)(table.given_up)
        self._causal = self._looks_back_only()

    def __call__(self, texts: Sequence[Sequence[int]], rng: Randomness) -> list[Obfuscated]:
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
                    for row, done in zip(some, _Bucket(self, [list(texts[r]) for r in some], rng).chosen()):
                        out[row] = done
        finally:
            self.base.train(training)
        return out

    def options(self, token: int) -> Tensor:
        """The substitutes of ``token``, none for a fixed one."""
        return torch.empty(0, dtype=torch.int64) if token in self.fixed else self.table.of(token)

    def embedded(self, ids: Tensor) -> Tensor:
        """What the model's word embedding makes of ``ids``."""
        return self.base.get_input_embeddings()(ids).detach()  # type: ignore[no-any-return]

    def wanted(self, text: Sequence[int]) -> Tensor:
        """The embeddings ``(length, hidden)`` whose hidden states the substitutes are to leave as they are."""
        rows = self.embedded(torch.tensor(text))
        if self.table.settings.group > 1:
            for place, token in enumerate(text):
                if len(self.options(token)):
                    rows[place] = self._centre(int(self.table.groups[token]))
        return rows

    def _mean_of_group(self, group: int) -> Tensor:
        return self.embedded((self.table.groups == group).nonzero().flatten()).mean(0)

    def states(self, embedded: Tensor, cache: Any = None) -> Tensor:
        """Hidden states of all layers for texts without padding: ``(layers, texts, length, hidden)``; behind ``cache``,
        which grows by them."""
        if cache is None:
            mask = torch.ones(embedded.shape[:2], dtype=torch.long)
            found = self.base(inputs_embeds=embedded, attention_mask=mask, output_hidden_states=True, use_cache=False)
        else:
            found = self.base(inputs_embeds=embedded, past_key_values=cache, output_hidden_states=True, use_cache=True)
        return torch.stack(found.hidden_states)

    @property
    def causal(self) -> bool:
        """Whether hidden states depend on earlier tokens only."""
        return self._causal

    def _looks_back_only(self) -> bool:
        width = self.embedded(torch.tensor([0])).shape[-1]
        probe = torch.randn(2, 2, width, generator=torch.Generator().manual_seed(0))
        probe[1, 0] = probe[0, 0]
        training = self.base.training
        self.base.eval()
        with torch.no_grad():
            found = self.states(probe)
        self.base.train(training)
        return torch.allclose(found[:, 0, 0], found[:, 1, 0], atol=1e-5)


class _Bucket:
    """Texts of one length on their way: of each, the best texts so far with their errors."""

    def __init__(self, selector: Selector, texts: list[list[int]], rng: Randomness) -> None:
        self.selector, self.settings, self.texts = selector, selector.settings, texts
        self.wanted = torch.stack([selector.wanted(text) for text in texts])
        with torch.no_grad():
            self.goal = selector.states(self.wanted)
        self.options = [[selector.options(token) for token in text] for text in texts]
        self.beams = self._scored([{self._first(row, rng): float("nan")} for row in range(len(texts))])

    def _first(self, row: int, rng: Randomness) -> Text:
        out = []
        for place, (token, options) in enumerate(zip(self.texts[row], self.options[row])):
            if not len(options):
                out.append(token)
            elif self.settings.start == "random":
                out.append(int(options[integers(len(options), (1,), rng)]))
            else:
                away = self.selector.embedded(options) - self.wanted[row, place]
                out.append(int(options[away.square().sum(1).argmin()]))
        return tuple(out)

    def chosen(self) -> list[Obfuscated]:
        """Sweep over the places until nothing improves."""
        alive = set(range(len(self.texts)))
        for _ in range(self.settings.sweeps):
            if not alive:
                break
            before = [min(beam.values()) for beam in self.beams]
            self._sweep(sorted(alive))
            alive = {r for r in alive if min(self.beams[r].values()) < (1 - self.settings.enough) * before[r]}
        return [self._told(text, beam) for text, beam in zip(self.texts, self.beams)]

    def _sweep(self, rows: Sequence[int]) -> None:
        """Every place once, the first to the last: its candidates tried; the best of all texts stay."""
        steps = self._steps(rows) if self.settings.tried else {}
        prefix = _Prefix(self, rows) if self.selector.causal and self.settings.beam == 1 else None
        for place in range(self.goal.shape[2]):
            moving = [r for r in rows if len(self.options[r][place])]
            tried = []
            for row in moving:
                candidates = self.options[row][place]
                if len(candidates) > self.settings.tried > 0:
                    candidates = candidates[steps[row](place, candidates).argsort()[: self.settings.tried]]
                texts = dict(self.beams[row])
                for text in self.beams[row]:
                    for token in candidates.tolist():
                        texts.setdefault((*text[:place], token, *text[place + 1 :]), float("nan"))
                tried.append(texts)
            for row, texts in zip(moving, self._scored(tried, moving, prefix)):
                best = sorted(texts.items(), key=lambda item: (item[1], item[0]))
                self.beams[row] = dict(best[: self.settings.beam])
            if prefix is not None:
                prefix.grow()

    def _steps(self, rows: Sequence[int]) -> dict[int, Any]:
        """For each of ``rows`` what tells, roughly, how candidates of a place change the error: the slope at the best text
        so far, and a curvature, alike in all directions, from the error itself, which is zero where nothing is replaced."""
        out: dict[int, Any] = {}
        for start in range(0, len(rows), max(1, TOGETHER // self.goal.shape[2])):
            some = rows[start : start + max(1, TOGETHER // self.goal.shape[2])]
            best = torch.tensor([min(self.beams[r], key=self.beams[r].__getitem__) for r in some])
            at = self.selector.embedded(best).requires_grad_(True)
            errors = self._errors(self.selector.states(at), self.goal[:, some])
            (slopes,) = torch.autograd.grad(errors.sum(), at)
            at = at.detach()
            away = (at - self.wanted[some]).square().sum((1, 2)).clamp_min(1e-12)
            for k, row in enumerate(some):
                out[row] = self._rough(at[k], slopes[k], CURVATURE * float(errors[k].detach() / away[k]))
        return out

    def _rough(self, at: Tensor, slope: Tensor, curvature: float) -> Any:
        def change(place: int, candidates: Tensor) -> Tensor:
            move = self.selector.embedded(candidates) - at[place]
            return move @ slope[place] + curvature * move.square().sum(1)

        return change

    def _scored(
        self, beams: Sequence[Mapping[Text, float]], rows: Sequence[int] | None = None, prefix: _Prefix | None = None
    ) -> list[dict[Text, float]]:
        """``beams``, those of ``rows``, with the error of the texts that have none yet."""
        rows = range(len(beams)) if rows is None else rows
        todo = [(k, text) for k, beam in enumerate(beams) for text, error in beam.items() if error != error]
        out = [dict(beam) for beam in beams]
        size = max(1, TOGETHER // self.goal.shape[2])
        for start in range(0, len(todo), size):
            some = todo[start : start + size]
            texts, numbers = torch.tensor([text for _, text in some]), [rows[k] for k, _ in some]
            with torch.no_grad():
                if prefix is None:
                    errors = self._errors(self.selector.states(self.selector.embedded(texts)), self.goal[:, numbers])
                else:
                    errors = prefix.errors(texts, numbers)
            for (k, text), error in zip(some, errors.tolist()):
                out[k][text] = error
        return out

    @staticmethod
    def _errors(states: Tensor, goal: Tensor) -> Tensor:
        """Mean squared difference over layers, places and hidden dimensions of each text."""
        return (states - goal).square().mean((0, 2, 3))

    def _told(self, text: Sequence[int], beam: Mapping[Text, float]) -> Obfuscated:
        ids, error = min(beam.items(), key=lambda item: item[1])
        weak, kept = {}, []
        for place, token in enumerate(text):
            code = self.selector.given_up(token)
            if token in self.selector.fixed or code == POLICY:
                continue
            if not len(self.selector.table.of(token)):
                kept.append(place)
            elif code:
                weak[place] = RELAXED[code]
        return Obfuscated(ids, error, weak, tuple(kept))


class _Prefix:
    """Of a decoder, what the places before the present one have computed already: texts of ``rows``, one each."""

    def __init__(self, bucket: _Bucket, rows: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.bucket, self.number = bucket, {row: k for k, row in enumerate(rows)}
        self.place = 0
        self.cache = DynamicCache()
        self.spent = torch.zeros(len(rows))
        """Squared differences of the hidden states so far, summed."""

    def errors(self, texts: Tensor, rows: Sequence[int]) -> Tensor:
        """As ``_Bucket._errors``, of ``texts`` that differ from the bucket's from the present place on."""
        where = torch.tensor([self.number[r] for r in rows])
        cache = copy.deepcopy(self.cache)
        if self.place:
            cache.batch_select_indices(where)
        states = self.bucket.selector.states(self.bucket.selector.embedded(texts[:, self.place :]), cache)
        goal = self.bucket.goal[:, rows]
        late = (states - goal[:, :, self.place :]).square().sum((0, 2, 3))
        return (self.spent[where] + late) / goal[:, 0].numel()

    def grow(self) -> None:
        """Move on to the next place, with the tokens that the bucket now has at this one."""
        rows = list(self.number)
        token = torch.tensor([next(iter(self.bucket.beams[r]))[self.place] for r in rows])[:, None]
        with torch.no_grad():
            states = self.bucket.selector.states(self.bucket.selector.embedded(token), self.cache)
        goal = self.bucket.goal[:, rows, self.place : self.place + 1]
        self.spent = self.spent + (states - goal).square().sum((0, 2, 3))
        self.place += 1
