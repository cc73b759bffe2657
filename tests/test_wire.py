"""Messages as bytes: round trips, real sizes, and everything that a server must refuse before it allocates."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rasura.interfaces import InputError
from rasura.rng import generator
from rasura.values import Message
from rasura.wire import MAGIC, Limits, from_bytes, mask_digest, to_bytes


def message(seed: int = 0) -> Message:
    rng = generator(seed)
    gradients = {
        "a.weight": torch.randn(5, 7, generator=rng),
        "b.bias": torch.randn(3, generator=rng).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2, generator=rng),
        "scalar": torch.randn((), generator=rng),
        "empty": torch.empty(0, 4),
    }
    visible = {"a.weight": torch.rand(5, 7, generator=rng) > 0.4, "c": torch.zeros(2, 2, 2, dtype=torch.bool)}
    gradients = {n: g * visible[n] if n in visible else g for n, g in gradients.items()}
    return Message(gradients, visible, {"bfv/0": b"cipher", "bfv/1": b""}, "fedavg-sgd", {"key": "ab", "clients": 3})


def same(one: Message, two: Message) -> bool:
    hidden = {n for n, m in one.visible.items() if not m.all()}
    return (
        one.gradients.keys() == two.gradients.keys()
        and all(g.dtype == two.gradients[n].dtype and torch.equal(g, two.gradients[n]) for n, g in one.gradients.items())
        and set(two.visible) == hidden
        and all(torch.equal(one.visible[n], two.visible[n]) for n in hidden)
        and (dict(one.sealed), one.kind, dict(one.header)) == (dict(two.sealed), two.kind, dict(two.header))
    )


def test_a_message_comes_back_whole() -> None:
    for seed in range(5):
        assert same(message(seed), from_bytes(to_bytes(message(seed))))


def test_only_visible_entries_travel() -> None:
    gradient = torch.randn(1000, 1000, generator=generator(0))
    visible = torch.rand(1000, 1000, generator=generator(1)) > 0.9
    whole = len(to_bytes(Message({"w": gradient})))
    part = len(to_bytes(Message({"w": gradient * visible}, {"w": visible})))
    none = len(to_bytes(Message({"w": torch.zeros(1000, 1000)}, {"w": torch.zeros(1000, 1000, dtype=torch.bool)})))
    assert 4e6 < whole < 4e6 + 500
    assert part == pytest.approx(4 * int(visible.sum()) + 1e6 / 8, abs=500) and none < 300


def test_agreed_masks_have_one_digest() -> None:
    one, two = message().visible, message(1).visible
    assert mask_digest(one) == mask_digest(dict(reversed(one.items()))) != mask_digest(two)


def rebuilt(change: dict[str, object], tail: bytes | None = None) -> bytes:
    """The bytes of a message whose header was changed."""
    data = to_bytes(message())
    (size,) = struct.unpack(">I", data[8:12])
    header = json.loads(data[12 : 12 + size])
    for key, value in change.items():
        place = header
        *path, last = key.split("/")
        for step in path:
            place = place[step]
        place[last] = value
    head = json.dumps(header).encode()
    return MAGIC + struct.pack(">I", len(head)) + head + (data[12 + size :] if tail is None else tail)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no message of Rasura"),
        (b"garbage" * 9, "no message of Rasura"),
        (MAGIC[:-1] + b"\x07" + to_bytes(message())[8:], "schema 7"),
        (MAGIC + b"\xff\xff\xff\xff" + b"x" * 50, "bytes of header"),
        (MAGIC + struct.pack(">I", 5) + b"{not}" + b"x" * 50, "malformed"),
        (to_bytes(message())[:-1], "cut or added to"),
        (to_bytes(message()) + b"\0", "cut or added to"),
        (rebuilt({"tensors/c/shape": [1 << 20, 1 << 20]}), "entries; at most"),
        (rebuilt({"tensors/c/shape": [-2, 2, 2]}), "malformed"),
        (rebuilt({"tensors/a.weight/shape": [5, 9]}), "a.weight"),
        (rebuilt({"tensors/b.bias/dtype": "float32"}), "b.bias"),
        (rebuilt({"tensors/c/hidden": "none"}), "not those of its header"),
        (rebuilt({"sealed": [["x", 1 << 40]]}), "bytes of a ciphertext"),
        (rebuilt({"sealed": [["x", 6], ["x", 0]]}), "malformed"),
        (rebuilt({"clear": -5}), "malformed"),
        (rebuilt({"header": {"a": [1]}}), "malformed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        from_bytes(data)


def test_numbers_that_are_none_never_enter_an_aggregate() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="no finite numbers"):
            from_bytes(to_bytes(Message({"w": torch.tensor([1.0, value])})))
    with pytest.raises(InputError, match="int64"):
        to_bytes(Message({"w": torch.tensor([1])}))


def test_limits_are_the_receivers() -> None:
    data = to_bytes(message())
    small = (Limits(total=100), Limits(header=10), Limits(entries=40), Limits(tensors=4), Limits(ciphertexts=1))
    for limits in (*small, Limits(ciphertext=5)):
        with pytest.raises(InputError, match="at most"):
            from_bytes(data, limits)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_are_refused_or_read_but_never_crash(data: st.DataObject) -> None:
    good = bytearray(to_bytes(message()))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for damaged in (bytes(good), bytes(good[:cut])):
        try:
            found = from_bytes(damaged)
        except InputError:
            continue
        assert all(bool(torch.isfinite(g).all()) for g in found.gradients.values())
