"""iDLG (Zhao et al. 2020): the label of a single example from the sign of the last layer's gradient."""

from __future__ import annotations

from torch import Generator

from rasura.attacks.updates.label_recovery import UNSIGNED, refuse_other_losses
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import CLASSIFIERS, AttackSpec
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.victims.models import one_class_each, parts


class IDLG:
    """The label of one text: the class whose part of the head's gradient has the opposite sign to all others.

    The update is taken for that of one text. Of several, the classes with a negative sign are all present; where there is
    not exactly one, the attack fails. The paper reads the rows of the weight, which share a sign with its classes where
    the head's inputs are not negative. Encoders have a tanh before the head, so the head's bias is read where it was sent:
    its gradient is softmax minus one-hot (the paper's equation 3). Without it the label is the row whose products with all
    other rows are not positive (equation 5), which takes three classes: of two, each is the other's opposite. The bias takes
    three as well where the sign of the update is not known, and one text. No text is guessed (``tokens=()``); ``labels``
    counts more, and takes batches.

    Raises ``NotApplicable`` for a causal model, a head that does not tell one label of several, and where the head's
    gradient is not in the update as a whole; ``AttackFailed`` where no class, or more than one, has that sign, without a
    sign for several texts: a class that none of them has then looks like the label of one, and where the bias shows that a
    file's loss is not plain cross entropy.
    """

    name = "idlg"
    needs = frozenset({Grant.MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        head = parts(seen.model).head if seen.task == "classification" else None
        if head is None or not one_class_each(seen.model):
            raise NotApplicable("the model has no single-label classification head of two classes or more")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else None
        bias, weight = (None if g is None else g.double().cpu() for g in map(seen.whole, (head.bias, head.weight)))
        if bias is not None and len(bias) > 1:
            refuse_other_losses(seen, bias)
            chosen = bias < 0
            if seen.message.sign == "unknown":
                if len(bias) == 2 or size != 1:
                    raise AttackFailed(UNSIGNED)
                chosen = chosen if int(chosen.sum()) == 1 else bias > 0
        elif weight is not None and (rows := weight.T if head.transposed else weight).shape[0] > 2:
            if size is not None and size > 1:
                raise AttackFailed(f"the head's weight tells the label of one text; the batch holds {size} texts")
            products = rows @ rows.T
            products.fill_diagonal_(0.0)
            chosen = (products <= 0).all(1) & rows.any(1)
        else:
            raise NotApplicable("the head's bias is not in the update, nor the weight of three classes or more")
        if int(chosen.sum()) != 1:
            raise AttackFailed(f"{int(chosen.sum())} classes have the sign of a label; expected the one of a single example")
        return Reconstruction((), "none", labels=(int(chosen.int().argmax()),))


SPEC = AttackSpec(
    name="idlg",
    about="reads the label of a single example from the sign of the gradient",
    source="Zhao et al. 2020 (iDLG), sec. 3",
    make=IDLG,
    seconds=0.1,
    tasks=CLASSIFIERS,
)
