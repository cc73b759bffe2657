"""One fine-tuning job in a process of its own: ``python -m rasura.server.worker STORE JOB DEVICE``.

It ends with the server (its standard input closes then), and resumes from the last complete epoch when it is started again.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, nn

from rasura.core.batches import Batch
from rasura.core.errors import InputError
from rasura.core.rng import generator
from rasura.core.values import Task
from rasura.metrics.utility import HIGHER_IS_BETTER, causal, classification
from rasura.server import data, models
from rasura.server.container import CONFIG, WEIGHTS
from rasura.server.lock import exclusive
from rasura.server.store import Job, Store
from rasura.victims.adapters import with_partial_adapter
from rasura.victims.batching import apart
from rasura.victims.outputs import check_predicted, nats, predictions
from rasura.victims.recipe import Recipe
from rasura.victims.train import FineTuning


def train(store: Store, job: Job, device: str) -> None:
    """Train by ``job`` and store the model. Raises ``InputError`` for errors that its tenant can fix."""
    import torch

    source = store.model_by_id(job.model)
    about, place = source.about, store.job_path(job.id)
    settings = data.JobSettings(**job.settings)
    task: Task = about["kind"]
    rows = data.read(place, task == "causal")
    order = torch.randperm(len(rows), generator=generator(settings.seed, "part")).tolist()
    count = min(len(rows) - 1, max(1, round(settings.holdout * len(rows))))
    held, rest = ([rows[k] for k in some] for some in (order[:count], order[count:]))
    # Where every held-out text is trained on, too, they still stop the training early, and no figure is stated.
    different = apart(held, rest)
    held = different or held
    if task == "causal":
        check_predicted(held, "the held-out texts")
    model = models.opened(store.path(source), task, device)
    if settings.method == "lora":
        model = with_partial_adapter(model, task, settings.rank or 1, settings.alpha, settings.seed)

    def figures(m: nn.Module) -> dict[str, float]:
        return _figures(m, held, task, about["pad"], settings.batch_size or 1)

    watched = "loss" if task == "causal" else "accuracy"
    recipe = Recipe(
        settings.epochs, settings.batch_size or 1, settings.learning_rate or 1e-4, patience=settings.patience,
        precision=settings.precision, seed=settings.seed,
    )  # fmt: skip
    run = FineTuning(
        model, rest, (), recipe, place / "training", task=task,
        vocabulary=data.vocabulary(about), evaluate=figures, watched=watched, higher=HIGHER_IS_BETTER[watched],
    )  # fmt: skip

    def noted() -> None:
        store.progress(job.id, run.history.epochs or [], run.history.best_epoch, len(different))

    def begun(done: int, total: int, _: object) -> None:
        if (done - 1) % (total // recipe.epochs) == 0:  # an epoch has begun, so that the one before is booked
            noted()

    run.run(begun)
    noted()  # also of a job that had ended but for its model
    merge: Any = getattr(model, "merge_and_unload", None)
    whole: Any = model if merge is None else merge()
    with store.incoming() as part:
        whole.save_pretrained(part, max_shard_size="1TB")
        for file in part.iterdir():
            if file.name not in (CONFIG, WEIGHTS):
                file.unlink()
        store.add_model(job.tenant, job.output, models.checked(part), part, by=job.id)


def _figures(model: nn.Module, held: list[Batch], task: Task, pad: int, max_together: int) -> dict[str, float]:
    """Of the ``held`` texts, at most as many at once as a step of the training takes, which the memory was counted for."""
    if task == "causal":
        return causal(*nats(model, held, pad, together=min(16, max_together)))
    return classification(
        predictions(model, held, pad, together=min(64, max_together)), [int(row.labels[0]) for row in held]
    )


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(3)


def main(arguments: list[str]) -> int:
    """Run one job. Errors are written to the store and nowhere else: messages of libraries may quote data."""
    folder, number, device = arguments
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = Store(folder)
    try:
        # A killed server's job may take a moment to end.
        with exclusive(Path(folder) / "jobs" / number / "lock.sqlite", 30.0, "the job"):
            train(store, store.job(number), device)
            state, reason = "done", ""
    except InputError as error:
        state, reason = "failed", str(error)
    except (MemoryError, OutOfMemoryError):
        state, reason = "failed", "the server has too little memory for this job"
    except Exception as error:
        state, reason = "failed", f"the training failed ({type(error).__name__})"
    store.end_job(number, state, reason)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
