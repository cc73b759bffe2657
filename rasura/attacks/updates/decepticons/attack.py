"""Decepticons: a server that sends crafted weights and reads the texts from the update that comes back."""

from __future__ import annotations

import torch
from torch import Generator, nn

from rasura.attacks.updates.decepticons.crafting import crafted, is_crafted
from rasura.attacks.updates.decepticons.layout import layout, matrix
from rasura.attacks.updates.decepticons.reading import read_tokens
from rasura.attacks.updates.decepticons.texts import along_prefixes, into_texts
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec
from rasura.core.values import UNKNOWN, Grant, Observation, Reconstruction, Task


class Decepticons:
    """An active attack (Fowl et al. 2022): crafts the weights that are trained on, then reads the update as any other does.

    It works for blocks like those of BERT, MPNet, GPT-2 and OPT, and for batches of up to about as many tokens as the
    feed-forward layer has rows, at any depth. What it needs of the update is the gradient of the first block's first
    feed-forward weight. Texts are ``matched``; a causal model's last token has no gradient and stays ``UNKNOWN``.

    Raises ``NotApplicable`` where the weights are not its own (an honest server) or that gradient is not sent, and
    ``AttackFailed`` where no token stands out in it.
    """

    name = "decepticons"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE})

    def craft(self, model: nn.Module, task: Task, *, rng: Generator) -> nn.Module:
        """The weights to send instead of ``model``, which is left as it is."""
        return crafted(model, task, rng)

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        model = seen.model
        where = layout(model, seen.task)
        if not is_crafted(model, where):
            raise NotApplicable(
                "the weights were not crafted for this attack; it needs a server that may send crafted weights"
            )
        gradient = seen.gradients.get(where.first.weight)
        mask = seen.visible.get(where.first.weight)
        if gradient is None or (mask is not None and not bool(mask.any())):
            raise NotApplicable(f"{where.first.weight} is not in the update: it is frozen, sealed or not sent")
        if not bool(torch.isfinite(gradient).all()):
            raise AttackFailed(f"the gradient of {where.first.weight} holds NaN or infinity")
        tokens, left = read_tokens(gradient.cpu().T if where.first.transposed else gradient.cpu(), model, where)
        if not tokens:
            raise AttackFailed(f"no token stands out in the gradient of {where.first.weight}")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else None
        texts = along_prefixes(tokens, model, where) if where.found.causal else into_texts(tokens, size)
        if seen.task == "causal":
            end = seen.vocabulary.suffix[-1] if seen.vocabulary.suffix else UNKNOWN
            texts = [(*text, end) for text in texts]
        details = {"tokens": len(tokens), "left_over": left, "rows": matrix(model, where.first).shape[0]}
        return Reconstruction(tuple(texts), "matched", residual=left, details=details)


SPEC = AttackSpec(
    name="decepticons",
    about="sends crafted weights and recovers every token from the update (needs --threat malicious-server)",
    source="Fowl et al. 2022 (Decepticons), sec. 3",
    make=Decepticons,
    seconds=5.0,
)
