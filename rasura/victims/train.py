"""Fine-tuning through the same ``step`` that is audited, with early stopping, checkpoints and resumption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rasura.accounting import Draw, Ledger
from rasura.core.accumulation import counted, gathered
from rasura.core.batches import Batch
from rasura.core.files import make_private, write_whole
from rasura.core.interfaces import Defense, InputError, NotApplicable
from rasura.core.precision import passes_in
from rasura.core.rng import Randomness, SecretGenerator, generator, secret_generator
from rasura.core.values import Stage, Task, Vocabulary
from rasura.victims.batching import batches, by_person, drawn, joined, none_of
from rasura.victims.fixed_order import FixedOrder, ordered
from rasura.victims.frozen_states import kept_states
from rasura.victims.history import Canaries, History, Progress, checked, diverged, unstored
from rasura.victims.recipe import Recipe
from rasura.victims.step import Kept, defended, step
from rasura.victims.trainable import enough, local


class FineTuning:
    """One fine-tuning run of ``model`` on ``rows`` (one text each) under ``defense``, kept in ``folder``.

    ``evaluate`` returns the figures on the held-out texts. Early stopping uses the figure ``watched``; with ``higher``,
    larger is better. ``poisson``: batches are drawn by Poisson sampling; ``secret``: the randomness of training comes from
    the operating system. ``ledger`` counts the releases; it is kept with the checkpoints. ``owners``: the number of the
    person of each row; persons are then drawn, each with all of their rows, and aggregated in place of texts. ``canaries``
    join every step, and are kept with the checkpoints as the ledger is. ``asked``: the texts that ``evaluate`` measures on.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Batch],
        defense: Defense,
        recipe: Recipe,
        folder: Path,
        *,
        task: Task,
        vocabulary: Vocabulary,
        evaluate: Callable[[nn.Module], Mapping[str, float]],
        watched: str,
        higher: bool,
        poisson: bool = False,
        secret: bool = False,
        ledger: Ledger | None = None,
        owners: Sequence[int] | None = None,
        canaries: Canaries | None = None,
        asked: Sequence[Batch] = (),
    ) -> None:
        if owners is not None and not poisson:
            raise InputError("persons are drawn by Poisson sampling alone; train with dp-sgd or normalised")
        self.poisson, self.secret, self.ledger, self.canaries = poisson, secret, ledger, canaries
        self.persons = None if owners is None else by_person(owners)
        self.model, self.rows, self.recipe, self.folder, self.asked = model, rows, recipe, folder, asked
        self.defense = tuple(p for p in local(defense) if p.stage is not Stage.DATA)
        self.task, self.vocabulary = task, vocabulary
        self.evaluate, self.watched, self.higher = evaluate, watched, higher
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = recipe.course.optimizing(self.trained.values(), fused=True)
        self.history = History(epochs=[])
        self.kept: Kept = {}
        self.order = self._fixed_order() if ordered([p.counted for p in defense]) else None
        self.min_tokens = enough(defense, model, rows)
        folder.mkdir(parents=True, exist_ok=True)

    def _fixed_order(self) -> FixedOrder:
        """The order and the noise of a training under ``dp-ftrl``. Raises ``InputError`` for another training's ledger."""
        if self.ledger is None or self.poisson:
            raise InputError("dp-ftrl trains in a fixed order, counted by a ledger; found none, or Poisson sampling")
        found = FixedOrder(self.ledger, self._rng("order"))
        if (found.size, self.ledger.run.examples) != (self.recipe.batch_size, len(self.rows)):
            raise InputError(
                f"the ledger plans batches of {found.size} of {self.ledger.run.examples} texts, but this training has "
                f"batches of {self.recipe.batch_size} of {len(self.rows)}"
            )
        self.kept = {"state": found.noise}
        return found

    def run(self, progress: Progress | None = None) -> History:
        """Train to the end, from the last complete epoch of an earlier run. The figures are the same as without an
        interruption. ``progress`` is told after each batch."""
        from safetensors.torch import load_file

        self._resume()
        with self._with_kept_states():
            while not self.history.finished(self.recipe):
                loss = self._epoch(self.history.epoch, progress)
                held = checked(self.evaluate(self.model), self.history.epoch + 1, self.recipe.learning_rate)
                self._book({"train_loss": loss, **held, **self._spent()})
        if self.ledger is not None and self.history.epoch < self.recipe.epochs:
            self.ledger.end()  # figures of its models ended it
        if self.recipe.keep == "best" and self.history.best_epoch not in (0, self.history.epoch):
            self._put(load_file(str(self.folder / "best.safetensors")))
        return self.history

    def _with_kept_states(self) -> AbstractContextManager[None]:
        """A context in which frozen blocks are computed once, not in every epoch, where epochs are left to gain from it."""
        left = 0 if self.history.finished(self.recipe) else self.recipe.epochs - self.history.epoch
        freezes = any(p.mechanism.name == "frozen-blocks" for p in self.defense)
        if left < 2 or not freezes or self.recipe.precision != "float32":
            return nullcontext()
        together = self.recipe.physical_batch_size or self.recipe.batch_size
        with defended(self.model, self.defense):
            return kept_states(self.model, [*self.rows, *self.asked], self.vocabulary.pad_id or 0, together)

    def _spent(self) -> dict[str, float]:
        """Epsilon of the releases made so far, where there is a guarantee."""
        found = None if self.ledger is None or self.ledger.formal is None else self.ledger.spent().epsilon
        return {} if found is None else {"epsilon": found}

    def _epoch(self, epoch: int, progress: Progress | None = None) -> float:
        losses = []
        device = next(self.model.parameters()).device
        size = self.recipe.batch_size
        order = self._rng("order", epoch)
        units = len(self.rows if self.persons is None else self.persons)
        draw = Draw("poisson", min(1.0, size / units))
        if self.order is not None:
            parts = self.order.parts
        elif self.poisson:
            parts = drawn(units, size, order)
        elif self.ledger is not None and self.ledger.formal is not None:
            # Batches of like lengths would depend on the texts: one that is replaced would move others between them.
            parts = batches([1] * len(self.rows), size, order)
            draw = Draw("disjoint", number=self.ledger.begin())
        else:
            parts = batches([row.input_ids.shape[1] for row in self.rows], size, order)
        if self.min_tokens:
            whole, rest = gathered([counted(self.rows[k] for k in part) for part in parts], self.min_tokens)
            whole[-1] += rest  # so that every text is learned from, and no update holds less than it must
            parts = [[k for place in group for k in parts[place]] for group in whole]
        held: dict[str, list[Tensor]] = {}
        for number, chosen in enumerate(parts):
            part, counts = self._with_all_rows(chosen)
            batch = joined([self.rows[k] for k in part], self.vocabulary.pad_id or 0) if part else none_of(self.rows[0])
            rng = self._rng("train", epoch, number)
            if self.order is not None:
                draw = self.order.take(part)
            record = self._recorded(draw, rng)
            defense, released = self._among(draw)
            try:
                with passes_in(self.recipe.precision, device.type):
                    taken = step(
                        self.model, batch, defense, task=self.task, vocabulary=self.vocabulary, rng=rng,
                        expected=min(size, units) if self.poisson or self.order else None, record=record,
                        most=self.recipe.physical_batch_size, counts=counts, kept=self.kept,
                    )  # fmt: skip
            except NotApplicable:
                raise diverged("the update of a step is not finite", epoch + 1, self.recipe.learning_rate) from None
            released()
            for name, gradient in taken.message.gradients.items():
                held.setdefault(name, []).append(gradient)
            if (number + 1) % self.recipe.accumulate == 0 or number + 1 == len(parts):
                first = number - number % self.recipe.accumulate
                self._stepped(held, number + 1 - first, (epoch + first / len(parts)) / self.recipe.epochs)
                held = {}
            if not math.isfinite(taken.loss):
                raise diverged("the loss is not a number", epoch + 1, self.recipe.learning_rate)
            losses += [taken.loss] if part else []
            if progress is not None:
                progress(epoch * len(parts) + number + 1, self.recipe.epochs * len(parts), (self.history.epochs or [{}])[-1])
        return sum(losses) / max(1, len(losses))

    def _among(self, draw: Draw) -> tuple[Defense, Callable[[], None]]:
        """The protection of one step with the canaries, if there are any, and what to call when its release was counted."""
        if self.canaries is None:
            return self.defense, lambda: None
        with defended(self.model, self.defense):
            shapes = {n: tuple(p.shape) for n, p in self.model.named_parameters() if p.requires_grad}
        return self.canaries.joined(self.defense, draw, shapes)

    def _with_all_rows(self, chosen: list[int]) -> tuple[list[int], list[int] | None]:
        """The rows of what was drawn and, where persons were, how many rows each of them has."""
        if self.persons is None:
            return chosen, None
        theirs = [self.persons[k] for k in chosen]
        return [row for rows in theirs for row in rows], [len(rows) for rows in theirs]

    def _stepped(self, held: Mapping[str, Sequence[Tensor]], count: int, done: float) -> None:
        """One step by the mean of ``count`` gradients, ``held`` by parameter, after a fraction ``done`` of all steps."""
        course = self.recipe.course
        for group in self.optimizer.param_groups:
            group["lr"] = course.rate(done)
        for name, parameter in self.trained.items():
            some = held.get(name)
            parameter.grad = None if some is None else (sum(some[1:], some[0]) / count).to(parameter.device, parameter.dtype)
        if course.clip:
            nn.utils.clip_grad_norm_(self.trained.values(), course.clip)
        self.optimizer.step()

    def _recorded(self, draw: Draw, rng: Randomness) -> Callable[[Sequence[int]], None] | None:
        """Records one release of a batch drawn as ``draw``. Raises ``InputError`` beyond the plan."""
        ledger = self.ledger
        if ledger is None:
            return None
        ledger.room(draw)
        return lambda sizes: ledger.made(draw, sizes, secret=isinstance(rng, SecretGenerator))

    def _rng(self, *names: str | int) -> Randomness:
        return secret_generator() if self.secret else generator(self.recipe.seed, *names)

    def _book(self, figures: dict[str, float]) -> None:
        from safetensors.torch import save_file

        h = self.history
        h.epoch += 1
        h.epochs = [*(h.epochs or []), figures]
        value = figures[self.watched]
        better = h.best is None or (value > h.best if self.higher else value < h.best)
        weights = {n: p.detach().cpu().contiguous() for n, p in self.trained.items()}
        if better:
            h.best, h.best_epoch = value, h.epoch
        moments = {
            f"{name}/{key}": value.detach().cpu().contiguous()
            for name, parameter in self.trained.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        last = {**{f"weight/{n}": w for n, w in weights.items()}, **{f"moment/{n}": m for n, m in moments.items()}}
        about = {"history": json.dumps(vars(h)), "kept": "{}"}
        if self.order is None:
            about["kept"] = json.dumps(self.kept, default=unstored)
        if self.ledger is not None:
            about["ledger"] = json.dumps(self.ledger.state_dict())
        if self.canaries is not None:
            about["canaries"] = json.dumps(self.canaries.state_dict())
        make_private(self.folder / "last.safetensors", partial(save_file, last, metadata=about))
        self._keep_best(weights)

    def _keep_best(self, weights: dict[str, Tensor]) -> None:
        """Keep ``weights``, of the last epoch, if it is the best: after the file that says so, as an epoch is repeated
        that has none."""
        from safetensors.torch import save_file

        if self.history.best_epoch == self.history.epoch:
            make_private(self.folder / "best.safetensors", partial(save_file, weights))

    def _resume(self) -> None:
        from safetensors import safe_open

        path = self.folder / "last.safetensors"
        if not path.exists():
            return
        with safe_open(str(path), framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            about: dict[str, str] = file.metadata() or {}
        history = History(**json.loads(about["history"]))
        if self.ledger is not None:
            if not (done := history.finished(self.recipe)):
                self.ledger.check_resumable(f"{path}: remove the folder to start over. ")
            if "ledger" not in about:
                raise InputError(f"{path} has no ledger, so earlier releases are unknown; remove it to start over")
            self.ledger.load_state_dict(json.loads(about["ledger"]), done=done)
        if self.canaries is not None:
            if "canaries" not in about:
                raise InputError(f"{path} has no canaries, so they did not see its releases; remove it to start over")
            self.canaries.load_state_dict(json.loads(about["canaries"]))
        self.history = history
        self.kept = json.loads(about.get("kept", "{}"))
        weights = {name: found[f"weight/{name}"] for name in self.trained}
        self._put(weights)
        self._keep_best(weights)
        for name, parameter in self.trained.items():
            prefix = f"moment/{name}/"
            state = {k.removeprefix(prefix): t for k, t in found.items() if k.startswith(prefix)}
            if state:
                self.optimizer.state[parameter] = {k: t.to(parameter.device) for k, t in state.items()}

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` and remove the files that only resumption needs."""
        write_whole(self.folder / "result.json", json.dumps(result, indent=1) + "\n")
        for name in ("last.safetensors", "best.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
