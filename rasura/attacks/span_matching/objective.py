"""How badly given texts, as embeddings or ids, fit the observed row spaces of all visible layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rasura.attacks.span.rows import RowSpace
from rasura.attacks.verify import pad
from rasura.values import Vocabulary
from rasura.victims.models import layer_inputs, parts

Body = tuple[int, ...]
"""A text without the tokens that the tokenizer puts around every text."""


class Objective:
    """Mean over visible layers and tokens of the squared relative distance from the layer's observed row space.

    At the float floor exactly for private texts, each by itself: the texts of a batch share one row space but do not see
    each other. No weight gradient is ever formed.
    """

    def __init__(self, model: nn.Module, spaces: Mapping[int, RowSpace], vocabulary: Vocabulary) -> None:
        """``spaces`` by block index."""
        known = parts(model)
        self.model = model
        self.modules = [known.blocks[k].qkv[0].module for k in sorted(spaces)]
        self.spaces = [spaces[k] for k in sorted(spaces)]
        self.prefix, self.suffix = vocabulary.prefix, vocabulary.suffix
        self.pad_id = vocabulary.pad_id or 0

    def whole(self, body: Body) -> tuple[int, ...]:
        """The text with the tokenizer's own tokens around it."""
        return (*self.prefix, *body, *self.suffix)

    def embeddings(self, e: Tensor, mask: Tensor, coverage: float) -> Tensor:
        """Objective ``(candidates,)`` of batches ``e`` ``(candidates, batch, length, hidden)``; ``mask``: real positions.

        Coverage: minus the log-determinant of the Gram matrix of the projected, normalised inputs, so that the tokens fill
        the space and do not all fall on the same true one.
        """
        count = len(e)
        found = layer_inputs(
            self.model, self.modules, inputs_embeds=e.flatten(0, 1), attention_mask=mask.expand(e.shape[:3]).flatten(0, 1)
        )
        real = mask.expand(e.shape[:3]).reshape(count, -1).to(e.dtype)
        total = e.new_zeros(count)
        for module, space in zip(self.modules, self.spaces):
            h = space.shown(found[module].reshape(count, -1, found[module].shape[-1]))
            inside = h @ space.basis.to(h.dtype)
            share = 1 - inside.square().sum(-1) / h.square().sum(-1).clamp_min(1e-12)
            total = total + (share * real).sum(1) / real.sum(1)
            if coverage:
                z = nn.functional.normalize(inside, dim=-1) * real[..., None]
                # Padding gets ones on the diagonal, so that it adds nothing to the determinant.
                gram = z @ z.transpose(1, 2) + torch.diag_embed(1e-3 + (1 - real))
                total = total - coverage * torch.logdet(gram) / real.sum(1)
        return total / len(self.spaces)

    @torch.no_grad()
    def texts(self, bodies: Sequence[Body], tokens: int = 2048) -> Tensor:
        """Objective ``(texts,)`` of each text by itself; about ``tokens`` tokens in a forward pass."""
        ids, mask = pad([self.whole(body) for body in bodies], self.pad_id)
        rows = max(1, tokens // ids.shape[1])
        out = []
        for x, real in zip(torch.split(ids, rows), torch.split(mask, rows)):
            found = layer_inputs(self.model, self.modules, input_ids=x, attention_mask=real)
            total = torch.zeros(len(x))
            for module, space in zip(self.modules, self.spaces):
                share = space.residual(found[module]).square()
                total += (share * real).sum(1) / real.sum(1)
            out.append(total / len(self.spaces))
        return torch.cat(out)
