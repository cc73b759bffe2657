"""The bag of words, from the rows of the word embedding that the update touches."""

from __future__ import annotations

from torch import Generator

from rasura.core.errors import AttackFailed, NotApplicable
from rasura.core.interfaces import Budget
from rasura.core.specs import AttackSpec
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.victims.models import parts


class TouchedRows:
    """Names every token whose row of the word embedding has a gradient (Melis et al. 2019, sec. 4).

    The tokens come back without their order, once for each text of the batch.
    """

    name = "touched-rows"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        rows = seen.gradients.get(parts(seen.model).word_embedding)
        if rows is None:
            raise NotApplicable("the gradient of the word embedding is not sent")
        touched = rows.abs().amax(dim=1).nonzero().flatten().tolist()
        if len(touched) == len(rows):
            raise AttackFailed("every row has a gradient, so that none stands out")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        return Reconstruction((tuple(touched),) * size, "matched", ordered=False)


SPEC = AttackSpec(
    name="touched-rows",
    about="names the tokens whose rows of the word embedding have a gradient",
    source="Melis et al. 2019, sec. 4",
    make=TouchedRows,
    seconds=0.1,
    embedding=True,
    knows=("value-clip",),
)
