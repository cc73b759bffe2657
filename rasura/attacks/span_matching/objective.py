"""How badly given texts, as embeddings or ids, fit the observed row spaces of all visible layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rasura.attacks.span.rows import RowSpace
from rasura.victims.models import layer_inputs, parts


class Objective:
    """Mean over visible layers and tokens of the squared relative distance from the layer's observed row space.

    At the float floor exactly for the private text (up to its order within the batch). ``candidates`` texts of a batch are
    rows of one forward pass; no weight gradient is ever formed.
    """

    def __init__(self, model: nn.Module, spaces: Mapping[int, RowSpace], lengths_mask: Tensor) -> None:
        """``spaces`` by block index; ``lengths_mask`` ``(candidates or 1, batch, length)`` marks real positions."""
        known = parts(model)
        self.model = model
        self.modules = [known.blocks[k].qkv[0].module for k in sorted(spaces)]
        self.bases = [spaces[k].basis.float() for k in sorted(spaces)]
        self.mask = lengths_mask

    def narrowed(self, rows: Tensor) -> Objective:
        """The same objective for some of the candidates."""
        out = object.__new__(Objective)
        out.model, out.modules, out.bases = self.model, self.modules, self.bases
        out.mask = self.mask[rows] if len(self.mask) > 1 else self.mask
        return out

    def _states(self, count: int, **inputs: Tensor) -> list[Tensor]:
        mask = self.mask.expand(count, -1, -1).flatten(0, 1)
        found = layer_inputs(self.model, self.modules, attention_mask=mask, **inputs)
        return [found[m].reshape(count, -1, found[m].shape[-1]) for m in self.modules]

    def embeddings(self, e: Tensor, coverage: float) -> Tensor:
        """Objective ``(candidates,)`` of ``e`` ``(candidates, batch, length, hidden)``, with the coverage term's weight.

        Coverage: minus the log-determinant of the Gram matrix of the projected, normalised inputs, so that the tokens fill
        the space and do not all fall on the same true one.
        """
        count = len(e)
        states = self._states(count, inputs_embeds=e.flatten(0, 1))
        real = self.mask.expand(count, -1, -1).reshape(count, -1).to(e.dtype)
        total = e.new_zeros(count)
        for h, basis in zip(states, self.bases):
            inside = h @ basis
            share = 1 - inside.square().sum(-1) / h.square().sum(-1).clamp_min(1e-12)
            total = total + (share * real).sum(1) / real.sum(1)
            if coverage:
                z = nn.functional.normalize(inside, dim=-1) * real[..., None]
                # Padding gets ones on the diagonal, so that it adds nothing to the determinant.
                gram = z @ z.transpose(1, 2) + torch.diag_embed(1e-3 + (1 - real))
                total = total - coverage * torch.logdet(gram) / real.sum(1)
        return total / len(self.bases)

    @torch.no_grad()
    def ids(self, tokens: Tensor, rows: int = 2048) -> Tensor:
        """Objective ``(candidates,)`` of ``tokens`` ``(candidates, batch, length)``; ``rows`` tokens in a forward pass."""
        assert len(self.mask) == 1, "discrete scoring takes one layout of lengths"
        step = max(1, rows // tokens[0].numel())
        real = self.mask.bool().flatten()
        out = []
        for chunk in torch.split(tokens, step):
            states = self._states(len(chunk), input_ids=chunk.flatten(0, 1))
            total = torch.zeros(len(chunk))
            for h, basis in zip(states, self.bases):
                h = h[:, real]
                outside = h - (h @ basis) @ basis.T
                total += (outside.square().sum(-1) / h.square().sum(-1)).mean(1)
            out.append(total / len(self.bases))
        return torch.cat(out)
