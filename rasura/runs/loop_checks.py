"""What a protected training loop is made of, checked: its protection, its model, its loader and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from rasura.accounting import Ledger, Run, assumes_poisson, sampling_for
from rasura.accounting.guarantees import Batching
from rasura.core.interfaces import Defense, InputError
from rasura.core.rng import Randomness
from rasura.core.values import Mechanism, Stage
from rasura.registry import parse_defense
from rasura.runs.carried import carried
from rasura.runs.drawing import DrawnLoader, OrderedLoader, numbered
from rasura.runs.earlier import LEDGER
from rasura.runs.guard import guarded
from rasura.victims.fixed_order import FixedOrder, ordered
from rasura.victims.trainable import local

PERSONS = "a guarantee for persons needs dp-sgd or normalised, and batches drawn by Poisson sampling"

RESUME = "load the model's state_dict() into a new model, and the ledger's state_dict() into the ledger that protects it"

GO_ON = (
    f"To go on with that training, {RESUME}. In another training, both epsilons count together: save the model, with the "
    f"ledger as {LEDGER} beside it, and load it from that folder; the new guarantee then names the earlier training"
)


def loop_defense(defense: str | Defense, physical: int | None = None) -> Defense:
    """The parts of ``defense``. Raises ``InputError`` for one that acts on data, or that holds updates back, for
    two that aggregate, and for a ``physical`` batch size without a part that aggregates texts."""
    parts = local(parse_defense(defense) if isinstance(defense, str) else defense)
    together = [p.mechanism.name for p in parts if p.stage is Stage.AGGREGATE]
    if len(together) > 1:
        raise InputError(f"{' and '.join(together)} both aggregate the batch; keep one of them")
    if any(p.stage is Stage.DATA for p in parts):
        raise InputError(
            "a protection of the data is applied before training; obfuscate the texts with rasura protect ghost first"
        )
    if any(p.mechanism.name == "accumulate" for p in parts):
        raise InputError("accumulate holds an update back until it contains enough tokens, which a backward "
            "pass cannot do; collect batches first (rasura.core.accumulation), or use rasura train")  # fmt: skip
    if physical is not None and (physical < 1 or all(p.stage is not Stage.AGGREGATE for p in parts)):
        raise InputError(f"physical_batch_size is {physical}; expected at least 1, and a protection that aggregates texts "
            "one by one, such as dp-sgd")  # fmt: skip
    return parts


def owners_of(loader: DataLoader[Any], unit: Sequence[str | int] | None) -> list[int] | None:
    """The number of the person of each row, where ``unit`` says whose it is."""
    if not hasattr(loader.dataset, "__len__"):
        raise InputError(
            "the loader's data set has no length, but the guarantee depends on it; pass a data set with a length"
        )
    return None if unit is None else numbered(unit, len(loader.dataset))


def drawing_loader(
    loader: DataLoader[Any], owners: Sequence[int] | None, ledger: Ledger, rng: Randomness, poisson: bool, masked: bool
) -> DrawnLoader | OrderedLoader | None:
    """A loader that draws as the guarantee assumes; None where the given one is kept, or nothing is proven. ``masked``: the
    model takes an attention mask."""
    by_chance = assumes_poisson(ledger.defense)
    if owners is not None and not (ledger.formal is not None and by_chance and poisson):
        raise InputError(PERSONS)
    if ordered(ledger.defense):
        if not poisson:
            raise InputError("dp-ftrl draws nothing by chance: it needs the fixed order of the loader that protect_training "
                "returns; leave poisson=False out")  # fmt: skip
        return OrderedLoader(loader, FixedOrder(ledger, rng), masked=masked)
    if ledger.formal is None or (by_chance and not poisson):
        return None
    return DrawnLoader(loader, ledger, rng, poisson=by_chance, owners=owners, masked=masked)


def batching(mechanisms: Sequence[Mechanism], poisson: bool) -> Batching:
    """How the batches of a training under ``mechanisms`` are drawn. Without ``poisson``, the given loader draws them where
    the guarantee assumes Poisson sampling."""
    return "shuffled" if assumes_poisson(mechanisms) and not poisson else sampling_for(mechanisms)


def planned_run(
    loader: DataLoader[Any], owners: Sequence[int] | None, size: int, epochs: int, max_steps: int | None,
    delta: float | None, drawn: Batching,
) -> Run:  # fmt: skip
    """The plan of a training on ``loader``, whose batches are ``drawn`` so; ``owners``: whose each row is, by number."""
    if owners is not None and drawn == "fixed":
        raise InputError(PERSONS)
    data: Any = loader.dataset
    count = len(data) if owners is None else len(set(owners))
    return Run(count, size, epochs, delta, drawn, max_steps, "text" if owners is None else "person")


def check_alone(model: nn.Module) -> None:
    """Raises ``InputError`` where several processes or devices may train ``model`` together: each of their ledgers would
    count its own releases alone."""
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes and (count := torch.distributed.get_world_size()) > 1:
        raise InputError(f"torch.distributed runs {count} processes. What each releases would go into one model, and each "
            "ledger would count its own releases alone; train in one process")  # fmt: skip
    if any(isinstance(one, nn.DataParallel | nn.parallel.DistributedDataParallel) for one in model.modules()):
        raise InputError("the model is wrapped for several devices (DataParallel, DistributedDataParallel), which a ledger "
            "does not see; protect the plain model and train it in one process, on one device")  # fmt: skip


def check_new(model: nn.Module) -> None:
    """Raises ``InputError`` for a model that is protected already, or that may hold releases of an earlier training: also
    in a part of it, such as an encoder, or base layers into which an adapter was merged."""
    for one in model.modules():
        earlier = guarded(one)
        if earlier is not None and not earlier.copied:
            raise InputError("the model is already protected; load it again to protect it differently")
        if earlier is not None and (count := earlier.made()):
            raise InputError(
                f"the model is a copy of one that made {count} releases, which a new ledger would not count. {GO_ON}"
            )
    if (found := carried(model)) is not None:
        raise InputError(
            f"{found[0]} was part of a protected training and may hold its releases, {found[1]} in all, which a new ledger "
            f"would not count. {GO_ON}"
        )


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ``InputError`` for a model that cannot be protected, and for an optimizer with other parameters."""
    check_new(model)
    check_alone(model)
    if hasattr(model, "_orig_mod"):
        raise InputError("protect the model before torch.compile; a compiled model cannot return gradients of single texts")
    if "forward" in vars(model):
        raise InputError("the model's forward was replaced (by accelerate?); protect the model before it is wrapped")
    if held := next((n for n, p in model.named_parameters() if p.grad is not None), None):
        raise InputError(f"{held} has a gradient from before the protection, which the first step would take as well; call "
            "model.zero_grad() before protect_training")  # fmt: skip
    own = {id(p) for p in model.parameters()}
    if optimizer is not None and any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer trains parameters that the model does not have; their gradients would be unprotected"
        )
