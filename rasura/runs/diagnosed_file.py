"""What will go wrong in a private training, from a file of texts: ``diagnose_training`` for the command line."""

from __future__ import annotations

from typing import Any

from rasura.core.errors import InputError
from rasura.core.rng import permutation, secret_generator
from rasura.core.values import Task
from rasura.data.columns import Columns
from rasura.data.text import load_examples
from rasura.runs.diagnosis import Diagnosis, diagnose_training
from rasura.runs.training import encoded
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.batching import joined
from rasura.victims.loading import load, with_one_label
from rasura.victims.recipe import Recipe
from rasura.victims.weights import classes_for


def diagnose_file(
    data: str,
    model: str,
    defense: str,
    recipe: Recipe,
    *,
    task: Task,
    examples: int,
    public: bool,
    texts: int = 30,
    target_epsilon: float | None = None,
    delta: float | None = None,
    lora: int = 0,
    num_labels: int | None = None,
    truncate: bool = False,
    max_length: int | None = None,
    columns: Columns | None = None,
) -> Diagnosis:
    """``diagnose_training`` on ``texts`` texts of ``data``, drawn at random, with a model and a plan as ``rasura train`` has
    them. Raises ``InputError`` for fewer texts, and as ``diagnose_training`` does."""
    found = load_examples(data, columns=columns, model=model)
    if not 2 <= texts <= len(found):
        raise InputError(
            f"{texts} texts of {data}, which has {len(found)}; expected at least two, and no more than there are"
        )
    some = [found[k] for k in permutation(len(found), secret_generator())[:texts].tolist()]
    labels = num_labels or classes_for(model, 1 + max(e.label or 0 for e in found))
    victim = with_one_label(load(model, task, num_labels=labels, attacked=lora > 0))
    made: Any = with_fresh_adapter(victim.model, task, lora, recipe.seed)
    batch = joined(encoded(victim, some, max_length=max_length, truncate=truncate), victim.vocabulary.pad_id or 0)
    optimizer = recipe.course.optimizing([p for p in made.parameters() if p.requires_grad], fused=False)
    return diagnose_training(
        made, batch.inputs(), defense, examples=examples, batch_size=recipe.batch_size, epochs=recipe.epochs, delta=delta,
        target_epsilon=target_epsilon, public=public, optimizer=optimizer,
    )  # fmt: skip
