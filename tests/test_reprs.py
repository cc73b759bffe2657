"""What is printed of an object holds no secret: a log or a traceback must not give away keys, tokens or permutations."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from rounds_setting import model

import rasura
from rasura.core.answers import ServiceTranscript
from rasura.core.ciphers import SigningKey
from rasura.core.values import Mechanism, Message, Stage
from rasura.defenses.homomorphic_keys import make_keys
from rasura.defenses.secure_aggregation.server import Server
from rasura.integrations.flower.agreement import agree
from rasura.integrations.flower.collector import Collector
from rasura.integrations.flower.secure_sums import TRAIN, Call, Masking, SecureSums, answered, terms_digest
from rasura.service_protections.service import Service
from rasura.testing.tiny import VOCABULARY

NAMES = re.compile(r"_?(secrets?|identity|nonce|salt|passphrase|password|permutation|shares)")
TYPES = re.compile(r"\b(SigningKey|PrivateKey|SecretGenerator)\b|\bState \| None")


def classes() -> Iterator[type[Any]]:
    """Every dataclass of the package."""
    for found in pkgutil.walk_packages(rasura.__path__, "rasura."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            yield from (
                c for c in vars(module).values()
                if inspect.isclass(c) and dataclasses.is_dataclass(c) and c.__module__ == found.name
            )  # fmt: skip


def secret(one: dataclasses.Field[Any]) -> bool:
    """Whether a field holds a secret by its name or type; ids of ``tokens`` in a tensor are a permutation."""
    if one.type in ("bool", "int"):
        return False
    return bool(NAMES.fullmatch(one.name) or TYPES.search(str(one.type)) or (one.name, one.type) == ("tokens", "Tensor"))


def test_fields_with_secrets_are_left_out_of_what_is_printed() -> None:
    # What dataclasses generate is compiled from a string.
    own = {c for c in classes() if inspect.unwrap(c.__repr__).__code__.co_filename != "<string>"}
    assert {c.__name__ for c in own} >= {"Key", "Context", "Obfuscated"} and Service not in own
    found = [(c, f) for c in classes() for f in dataclasses.fields(c) if secret(f)]
    assert {c.__name__ for c, _ in found} >= {"Service", "Masking", "ClientSetup", "Key", "Ticket", "Server"}
    shown = [f"{c.__module__}.{c.__name__}.{f.name}" for c, f in found if f.repr and c not in own]
    assert not shown, "write field(repr=False) for " + ", ".join(shown)


def holds(shown: str, secrets: Mapping[str, bytes]) -> list[str]:
    return [name for name, data in secrets.items() if data.hex() in shown or repr(data)[2:-1] in shown]


def test_nothing_of_a_secure_sum_prints_the_secret_of_a_client() -> None:
    pytest.importorskip("cryptography")
    made = agree("sealing:all/by=secagg", model())
    digest = terms_digest(made, made.start, 0, 1e-3)
    states: dict[int, Mapping[str, bytes]] = {}

    def ask(stage: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, object]]:
        for node, data in messages.items():
            answer, states[node] = answered(made, Call(stage, 1, sums.session, digest, data), states.get(node))
            yield node, answer

    collector = Collector(made, log=lambda line: None)
    collector.secure = sums = SecureSums(made, 1, digest, print, ask, collector.ledger)
    boxes = sums.begin([1, 2, 3])
    identity = SigningKey(bytes(range(32)))
    for node in (1, 2, 3):
        masking = Masking(made, Call(TRAIN, 1, sums.session, digest, boxes[node]), states[node], 1e-3, 0, identity)
        before, secrets = repr(masking), dict(states[node])
        message = masking.apply(Message({n: torch.zeros_like(t) for n, t in made.start.items()}), 1.0)
        assert len(secrets["secret"]) == 32 and not holds(before + repr(masking), {"secret": secrets["secret"]})
        assert not holds(before, {"identity": bytes(range(32))})
        states[node] = dict(masking.state or {})
        sums.add(node, message.sealed["secagg/000000"])
    sums.opened(1e-3, 3.0)
    server: Server[int] = sums.server
    revealed = {f"{k} {n}": s for k, some in server._shares.items() for n, s in some.items()}
    assert revealed and not holds(repr(server), revealed)
    ticket = collector.ticket(1, 1)
    assert ticket.nonce not in repr(ticket) and ticket.nonce not in repr(collector)


def test_the_permutation_of_a_service_is_not_printed() -> None:
    tokens = torch.arange(5) + 987_650
    mechanism = Mechanism("obfuslm", Stage.MODEL, {})
    net = torch.nn.Linear(2, 2)
    made = Service(net, net, VOCABULARY, mechanism, tokens)
    truth = ServiceTranscript(net, net, tokens, ((987_654,),), VOCABULARY, mechanism)
    assert "98765" not in repr(made) + repr(truth)
    assert "obfuslm" in repr(made) and "obfuslm" in repr(truth)


def test_a_secret_context_is_not_printed() -> None:
    pytest.importorskip("tenseal")
    keys = make_keys(4)
    agreed = agree("sealing:all/by=bfv", model(), keys)
    assert keys.secret and not holds(repr(keys) + repr(agreed), {"keys": keys.data[:64], "more": keys.data[-64:]})
    assert keys.key in repr(agreed)
