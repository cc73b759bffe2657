"""How far candidates are from the observed gradient: embeddings, labels and dropout masks through the model and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.shared.mechanism import announced_dropout, announced_noise
from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.guesses import Texts
from rasura.attacks.updates.gradient_matching.likely import WEIGHT, likely
from rasura.attacks.updates.gradient_matching.masks import Masked, shapes
from rasura.attacks.updates.gradient_matching.objective import Distance, soft_cross_entropy
from rasura.attacks.updates.gradient_matching.reorder import reordered
from rasura.attacks.updates.gradient_matching.settings import Settings, Work
from rasura.core.values import UNKNOWN as OVER
from rasura.core.values import Grant, Observation
from rasura.victims.positions import longest_text

NORMAL_MEDIAN = 0.6745
"""The median of the absolute value of a standard normal number."""

SAMPLE = 1_000_000
"""Entries, at least, that show the noise."""

CHUNKS = {"cpu": 16, "cuda": 256}
"""Candidates in one evaluation, by the kind of device: more gain little, and memory grows."""


class Judge:
    """Tells the distance of candidate texts. Ids are ``(batch, width)``, ``OVER`` behind a text's end."""

    def __init__(
        self,
        settings: Settings,
        work: Work,
        seen: Observation,
        factoriser: Factoriser,
        observed: Mapping[str, Tensor],
        lengths: tuple[int, ...],
        exact: bool,
        rng: torch.Generator,
        memory_mb: int,
    ) -> None:
        self.settings, self.work, self.seen, self.factoriser, self.rng = settings, work, seen, factoriser, rng
        model, vocabulary = factoriser.model, seen.vocabulary
        self.prefix, self.suffix = len(vocabulary.prefix), len(vocabulary.suffix)
        self.lengths, self.vary = lengths, not exact
        # Where only the sum of the lengths is known, a text may be half as long again as the mean.
        most = max(max(lengths), longest_text(seen.model))
        self.width = max(lengths) if exact else min(math.ceil(1.5 * max(lengths)), most)
        self.table, self.ordinary = token_table(model, vocabulary), ordinary_ids(vocabulary)
        self.likely = likely(seen, self.ordinary, self.width) if work.guided and len(lengths) == 1 else None
        self.classes = int(model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        self.device = self.table.device
        self.granted = seen.labels.to(self.device) if Grant.LABELS in seen else None
        self.rate = announced_dropout(seen) if settings.learn_masks else 0.0
        self.shapes = shapes(model, len(lengths), self.width) if self.rate else []
        self.distance = Distance(
            observed, settings.objective, alpha=settings.alpha if work.entries else 0.0,
            visible=factoriser.observed(seen.visible), entries=work.entries or 1.0,
            norm=_clipped(seen, observed) if settings.match_norm else None,
            deviation=deviation_of(seen, observed) if settings.objective == "weighted" else 0.0,
            free=self.table.shape[1] * sum(lengths), rng=rng,
        )  # fmt: skip
        self.chunk = max(1, min(CHUNKS[self.device.type], (memory_mb << 20) // self.bytes_each()))

    def bytes_each(self) -> int:
        """Rough size of one candidate's step: a second derivative through the activations."""
        widths = sum(sum(g.shape) for g in self.distance.observed.values() if g.dim() == 2)
        return 48 * widths * self.width * len(self.lengths) + 1

    def frame(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids with the tokenizer's own tokens in place, and which places are free, of texts of ``lengths``."""
        ids, real, free = template(self.seen.vocabulary, lengths, self.width)
        return torch.where(real.bool(), ids, OVER), free

    def embedded(self, ids: Tensor) -> Tensor:
        """The embeddings of ``ids``."""
        return self.table[ids.clamp_min(0).to(self.device)]

    def real(self, lengths: Tensor) -> Tensor:
        """Which places texts of ``lengths`` have, ``(..., width)``, where the model is."""
        return (torch.arange(self.width) < lengths[..., None]).to(self.device)

    def misfit(self, texts: Texts, graph: bool, masks: Sequence[Tensor] = ()) -> Tensor:
        """The distance of each candidate under dropout ``masks``, if any; with ``graph`` it can be differentiated."""
        targets = texts.y.softmax(-1)
        if self.granted is not None:
            targets = nn.functional.one_hot(self.granted, self.classes).to(targets.dtype).expand_as(targets)
        real = self.real(texts.lengths).long()
        with Masked(masks, self.rate) if masks else nullcontext():
            found = self.factoriser(texts.e, real, lambda z: soft_cross_entropy(z, targets), graph=graph)
        return self.distance(found)

    def scores(self, texts: Texts) -> Tensor:
        """The distance of each candidate with dropout off, without a graph; ``y`` may be one for all.

        Masks that were learned for one order of the tokens hide what is wrong with it, so orders are told apart without.
        """
        out = []
        for part in torch.split(torch.arange(len(texts)), self.chunk):
            some = Texts(texts.e[part], texts.lengths[part], texts.y.expand(len(texts), -1, -1)[part])
            e = some.e.detach().clone().requires_grad_(True)
            out.append(self.misfit(replace(some, e=e), False).detach())
        return torch.cat(out)

    def judged(self, ids: Tensor, y: Tensor) -> Tensor:
        """The distance of each of ``ids`` ``(candidates, batch, width)``, with labels ``y`` ``(1, batch, classes)``; on the
        CPU."""
        found = self.scores(Texts(self.embedded(ids), (ids != OVER).sum(-1), y)).cpu()
        return found if self.likely is None else found * (WEIGHT * self.likely.distance(ids)).exp()

    def nearest(self, texts: Texts) -> Tensor:
        """The ordinary tokens nearest to the embeddings of ``texts``, the tokenizer's own in their places."""
        ids, free = self.frame(texts.lengths)
        return torch.where(free, self.near(texts, 1)[..., 0], ids)

    def near(self, texts: Texts, count: int) -> Tensor:
        """The ``count`` ordinary tokens nearest to each embedding of ``texts``, ``(candidates, batch, width, count)``."""
        return nearest_tokens(texts.e.detach(), self.table, self.ordinary.to(self.device), count).cpu()

    def in_orders(self, text: Texts, tried: Tensor) -> Tensor:
        """The distance of one candidate with its embeddings in each of the orders ``tried``; on the CPU."""
        e = reordered(text.e.expand(len(tried), -1, -1, -1), tried)
        return self.scores(Texts(e, text.lengths.expand(len(tried), -1), text.y)).cpu()

    def masks(self, count: int) -> list[Tensor]:
        """Dropout masks of ``count`` candidates at their mean, which is much nearer to any mask than a random one is."""
        return [torch.full((count, *shape), 1 - self.rate, device=self.device) for shape in self.shapes]


def deviation_of(seen: Observation, observed: Mapping[str, Tensor]) -> float:
    """The standard deviation of the noise on an entry: as announced, else as the median of a sample of entries shows it.

    Most entries of a gradient are far below its mean square, so that noise which matters is most of what they hold.
    """
    deviation = announced_noise(seen)[0]
    if deviation > 0:
        return deviation
    apart = max(1, sum(g.numel() for g in observed.values()) // SAMPLE)
    drawn = torch.cat([g.flatten()[::apart] for g in observed.values()])
    drawn = drawn[drawn != 0].abs()  # hidden, or pruned
    return float(drawn.median()) / NORMAL_MEDIAN if len(drawn) else 0.0


def _clipped(seen: Observation, observed: Mapping[str, Tensor]) -> float | None:
    """The norm that clipping left of ``observed``, without the noise's share; None where no clipping is announced."""
    deviation, clip = announced_noise(seen)
    if math.isinf(clip):
        return None
    shown = sum(int(seen.visible[n].sum()) if n in seen.visible else g.numel() for n, g in observed.items())
    signal = sum(float(g.square().sum()) for g in observed.values()) - shown * deviation**2
    return min(clip, math.sqrt(max(signal, 1e-4 * clip**2)))
