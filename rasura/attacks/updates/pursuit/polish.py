"""Texts that the pursuit found, improved position by position on all visible gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import token_table
from rasura.attacks.shared.labelings import MAX_LABELINGS, pad
from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.judging import CHUNKS
from rasura.attacks.updates.gradient_matching.objective import Distance, Kind, soft_cross_entropy
from rasura.attacks.updates.pursuit.search import Search
from rasura.attacks.updates.span.sentences import rearranged
from rasura.core.values import Grant, Observation

Texts = tuple[tuple[int, ...], ...]


class Polish:
    """Improves texts position by position on the visible gradients of all linear and LayerNorm layers."""

    def __init__(self, seen: Observation, search: Search, kind: Kind, rng: torch.Generator) -> None:
        self.seen, self.search = seen, search
        self.factoriser = Factoriser(seen.model, list(seen.gradients))
        observed, visible = (self.factoriser.observed(x) for x in (seen.gradients, seen.visible))
        # Masks need every entry formed, and a part of them tells texts apart as well.
        self.distance = Distance(observed, kind, visible=visible, entries=0.1, rng=rng)
        self.table = token_table(seen.model, seen.vocabulary)
        self.classes = int(seen.model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config

    def __call__(self, texts: Texts, tried: int, sweeps: int) -> tuple[Texts, float]:
        labels = self._labels(texts)
        texts, best = self._moved(texts, float(self._scores([texts], labels)[0]), labels)
        for _ in range(sweeps):
            before = best
            for place in range(len(self.search.prefix), max(map(len, texts))):
                live = [k for k, text in enumerate(texts) if place < len(text) - len(self.search.suffix)]
                if not live:
                    continue
                rest = {p: sorted({t[p] for t in texts if p < len(t)}) for p in range(max(map(len, texts))) if p != place}
                gains = self.search.gains(self.search.left(rest), place)
                pool = self.search.ids[gains.topk(min(tried, len(gains))).indices].tolist()
                for k in live:
                    variants = [_with(texts, {k: t}, place) for t in pool]
                    variants += [_with(texts, {k: texts[j][place], j: texts[k][place]}, place) for j in live if j != k]
                    texts, best = self._better(texts, best, variants, labels)
            texts, best = self._moved(texts, best, labels)
            if best >= before:
                break
        return texts, best

    def _better(self, texts: Texts, best: float, others: Sequence[Texts], labels: Tensor) -> tuple[Texts, float]:
        scores = self._scores(others, labels)
        least = float(scores.min())
        return (others[int(scores.argmin())], least) if least < best else (texts, best)

    def _moved(self, texts: Texts, best: float, labels: Tensor) -> tuple[Texts, float]:
        """Texts with one token moved. Neighbouring positions are alike, so a run of tokens may be off by one place, which
        one move corrects. Where lengths are unknown and the closing token was found one place late, removing a token does.
        """
        last = float("inf")
        while best < last:
            last = best
            for k in range(len(texts)):
                if moves := self._moves(texts, k):
                    texts, best = self._better(texts, best, moves, labels)
                begin, end = len(self.search.prefix), len(texts[k]) - len(self.search.suffix)
                if not self.search.known and end - begin > 1:
                    less = sorted({(*texts[k][:i], *texts[k][i + 1 :]) for i in range(begin, end)})
                    texts, best = self._better(texts, best, [(*texts[:k], t, *texts[k + 1 :]) for t in less], labels)
        return texts, best

    def _moves(self, texts: Texts, k: int) -> list[Texts]:
        """``texts`` with one token of text ``k`` elsewhere, or two of its tokens swapped."""
        moved = rearranged(texts[k], len(self.search.prefix), len(texts[k]) - len(self.search.suffix))
        return [(*texts[:k], text, *texts[k + 1 :]) for text in moved]

    def _labels(self, texts: Texts) -> Tensor:
        """The likeliest labels; granted ones in every order, since texts stand by their length."""
        every: Iterable[tuple[int, ...]] = itertools.product(range(self.classes), repeat=len(texts))
        if Grant.LABELS in self.seen:
            every = sorted(set(itertools.permutations(self.seen.labels.tolist())))
        tried = [torch.tensor(y) for y in itertools.islice(every, MAX_LABELINGS)]
        return min(tried, key=lambda y: float(self._scores([texts], y)[0]))

    def _scores(self, many: Sequence[Texts], labels: Tensor) -> Tensor:
        """The distance of each of ``many`` batches of texts, all of the same lengths."""
        targets = nn.functional.one_hot(labels, self.classes).float()
        out = []
        for start in range(0, len(many), CHUNKS["cpu"]):
            some = many[start : start + CHUNKS["cpu"]]
            padded = [pad(texts, self.seen.vocabulary.pad_id or 0) for texts in some]
            e = self.table[torch.stack([ids for ids, _ in padded])].requires_grad_(True)
            goal = targets.expand(len(e), -1, -1)
            found = self.factoriser(e, padded[0][1], partial(soft_cross_entropy, targets=goal), graph=False)
            out.append(self.distance(found).detach())
        return torch.cat(out)


def _with(texts: Texts, tokens: Mapping[int, int], place: int) -> Texts:
    """``texts`` with other tokens at ``place``, by text."""
    return tuple((*t[:place], tokens[k], *t[place + 1 :]) if k in tokens else t for k, t in enumerate(texts))
