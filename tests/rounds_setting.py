"""Clients and a server of one federated round, without a network."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from rasura.core.batches import Batch
from rasura.core.updates import changed
from rasura.defenses.homomorphic_keys import Context as Keys
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.agreement import Agreement, agree
from rasura.testing.tiny import CLS, SEP, batch_of, tiny

RATE = 0.1


FIRST = 0.25


DEFENSES = ("none", "sealing:param=0.1/embeddings=sealed/scheme=bfv", "sealing:all/scheme=bfv")


def model() -> torch.nn.Module:
    return tiny("bert", "classification", hidden=8, blocks=1)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return make_keys(4)


def sides(defense: str, keys: Keys) -> tuple[Agreement, Agreement]:
    """The clients' agreement, for rounds of any number of clients, and the server's."""
    return agree(defense, model(), keys, min_clients=1, allow_few_clients=True), agree(defense, model(), keys.public())


def texts(client: int) -> Batch:
    rows = [[CLS, 20 + 7 * client + k, 40 + client, 3, 60 + 2 * k, SEP] for k in range(2 + client % 2)]
    return batch_of(rows, "classification", [(client + k) % 3 for k in range(len(rows))])


def trained(client: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step of SGD on the client's own texts."""
    own = model()
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(weights[name])
    gradient, _ = changed(own, texts(client).inputs(), list(weights))
    return {n: w - RATE * gradient[n] if n in gradient else w.clone() for n, w in weights.items()}


def averaged(
    weights: dict[str, Tensor], clients: Iterable[int], shares: dict[int, float] | None = None
) -> dict[str, Tensor]:
    """Plain FedAvg of one round, in float64."""
    found = {c: trained(c, weights) for c in clients}
    total = sum((shares or {}).get(c, 1.0) for c in found)
    return {n: sum(t[n].double() * (shares or {}).get(c, 1.0) for c, t in found.items()) / total for n in weights}  # type: ignore[misc]


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)
