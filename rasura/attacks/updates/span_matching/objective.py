"""How badly given texts, as embeddings or ids, fit the observed row spaces of all visible layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rasura.attacks.shared.labelings import pad
from rasura.attacks.updates.span.rows import RowSpace, row_space, visible_gradients
from rasura.core.values import Observation, Vocabulary
from rasura.victims.models import layer_inputs, parts, reading_tokens
from rasura.victims.positions import read_position

Body = tuple[int, ...]
"""A text without the tokens that the tokenizer puts around every text."""


RIDGE = 1e-3
"""Squared length, of unit inputs, under which directions of a text's span do not count in full: inputs nearly the same."""


class Readout(NamedTuple):
    """A layer that only sees what the head reads: ``space`` has one dimension for each text, not for each token."""

    module: str
    space: RowSpace
    position: int


def readout(seen: Observation, texts: int) -> Readout | None:
    """The first layer behind the last block's attention that shows one dimension for each of ``texts``; None where the head
    reads more than one position of a text, or no such gradient is visible.

    Its input, what attention gathers at that position, depends on every token of the text.
    """
    known = parts(seen.model)
    last = known.blocks[-1]
    behind = [lin for lin in known.linears if lin.module.startswith(f"{last.module}.") and lin not in last.qkv]
    position = read_position(seen.model) if behind else None
    if position is None:
        return None
    for lin in reading_tokens(seen.model, behind):
        space = row_space(visible_gradients(seen, [lin]))
        if space is not None and space.rank == texts:
            return Readout(lin.module, space, position)
    return None


class Objective:
    """Mean over visible layers and tokens of the squared relative distance from the layer's observed row space, and the same
    for what the head reads of each text.

    At the float floor exactly for private texts, each by itself: the texts of a batch share one row space but do not see
    each other. No weight gradient is ever formed. The second part tells parts of texts, and texts of other texts' words,
    from whole ones, which the first does not (six texts of two, last block: .01 to .04 and .2 to .5; with two wrong tokens
    .07 and .09).
    """

    def __init__(
        self, model: nn.Module, spaces: Mapping[int, RowSpace], vocabulary: Vocabulary, read: Readout | None = None
    ) -> None:
        """``spaces`` by block index."""
        known = parts(model)
        self.model = model
        self.modules = [known.blocks[k].qkv[0].module for k in sorted(spaces)]
        self.spaces = [spaces[k] for k in sorted(spaces)]
        self.read = read
        self._taken: dict[str, Tensor] = {}
        self._recorded = self.modules + ([read.module] if read else [])
        self.prefix, self.suffix = vocabulary.prefix, vocabulary.suffix
        self.pad_id = vocabulary.pad_id or 0

    def whole(self, body: Body) -> tuple[int, ...]:
        """The text with the tokenizer's own tokens around it."""
        return (*self.prefix, *body, *self.suffix)

    @torch.no_grad()
    def exclude(self, bodies: Sequence[Body]) -> None:
        """From now on, look for texts beside ``bodies``, which are known to be private texts."""
        ids, mask = pad([self.whole(body) for body in bodies], self.pad_id)
        found = layer_inputs(self.model, self._recorded, input_ids=ids, attention_mask=mask)
        inputs = {m: found[m][mask.bool()] for m in self.modules}
        if self.read is not None:
            inputs[self.read.module] = self._what_is_read(found, mask)
        self._taken = {m: torch.linalg.qr(x.T).Q for m, x in inputs.items()}

    def _beside(self, module: str, x: Tensor) -> Tensor:
        """``x`` without what lies in the span of the excluded texts' inputs."""
        taken = self._taken.get(module)
        return x if taken is None else x - (x @ taken) @ taken.T

    def embeddings(self, e: Tensor, mask: Tensor, coverage: float) -> Tensor:
        """Objective ``(candidates,)`` of batches ``e`` ``(candidates, batch, length, hidden)``; ``mask``: real positions.

        Coverage: minus the log-determinant of the Gram matrix of the projected, normalised inputs, so that the tokens fill
        the space beside excluded texts and do not all fall on the same true one.
        """
        count = len(e)
        found = layer_inputs(
            self.model, self._recorded, inputs_embeds=e.flatten(0, 1), attention_mask=mask.expand(e.shape[:3]).flatten(0, 1)
        )
        real = mask.expand(e.shape[:3]).reshape(count, -1).to(e.dtype)
        total = e.new_zeros(count)
        for module, space in zip(self.modules, self.spaces):
            h = space.shown(found[module].reshape(count, -1, found[module].shape[-1]))
            basis = space.basis.to(h.dtype)
            inside = h @ basis
            share = 1 - inside.square().sum(-1) / h.square().sum(-1).clamp_min(1e-12)
            total = total + (share * real).sum(1) / real.sum(1)
            if coverage:
                size = inside.norm(dim=-1, keepdim=True).clamp_min(1e-12)
                beside = self._beside(module, h) @ basis if self._taken else inside
                z = beside / size * real[..., None]
                # Padding gets ones on the diagonal, so that it adds nothing to the determinant.
                gram = z @ z.transpose(1, 2) + torch.diag_embed(1e-3 + (1 - real))
                total = total - coverage * torch.logdet(gram) / real.sum(1)
        if self.read is None:
            return total / len(self.spaces)
        read = self._what_is_read(found, mask.expand(e.shape[:3]).flatten(0, 1))
        return total / len(self.spaces) + self.read.space.residual(read).square().view(count, -1).mean(1)

    def _what_is_read(self, found: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """What goes into the readout's layer where the head reads, ``(texts, inputs)``; ``mask``: ``(texts, length)``."""
        assert self.read is not None
        at = mask.sum(1) - 1 if self.read.position else torch.zeros(len(mask), dtype=torch.long)
        return found[self.read.module][torch.arange(len(mask)), at]

    @torch.no_grad()
    def texts(self, bodies: Sequence[Body], tokens: int = 2048, kept: list[Tensor] | None = None) -> Tensor:
        """Objective ``(texts,)`` of each text by itself; about ``tokens`` tokens in a forward pass.

        What goes into the first visible layer and is shown joins ``kept``, ``(texts, length, width)`` of each pass.
        """
        ids, mask = pad([self.whole(body) for body in bodies], self.pad_id)
        rows = max(1, tokens // ids.shape[1])
        out = []
        for x, real in zip(torch.split(ids, rows), torch.split(mask, rows)):
            found = layer_inputs(self.model, self._recorded, input_ids=x, attention_mask=real)
            if kept is not None:
                kept.append(self.spaces[0].shown(found[self.modules[0]]))
            total = torch.zeros(len(x))
            for module, space in zip(self.modules, self.spaces):
                total += self._distance(module, space, found[module], real)
            total /= len(self.spaces)
            if self.read is not None:
                read = self._what_is_read(found, real)[:, None]
                total += self._distance(self.read.module, self.read.space, read, torch.ones(len(x), 1))
            out.append(total)
        return torch.cat(out)

    def _distance(self, module: str, space: RowSpace, x: Tensor, mask: Tensor) -> Tensor:
        """Mean squared sine ``(texts,)`` between ``space`` and the span of the inputs ``x`` ``(texts, length, inputs)``, as
        far as it is beside excluded texts.

        Of the span, not of the inputs one by one: else a text with the same word twice would fit as well as one without.
        """
        x = space.shown(x)
        x = nn.functional.normalize(x, dim=-1) * mask[..., None]
        outside = space.outside(x)
        beside = self._beside(module, x)
        gram = beside @ beside.mT + RIDGE * torch.eye(x.shape[1])
        shares: Tensor = torch.linalg.solve(gram, outside @ outside.mT).diagonal(dim1=1, dim2=2)
        return shares.sum(1) / mask.sum(1)
