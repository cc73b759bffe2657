"""Messages as bytes: round trips, real sizes, and everything that a server must refuse before it allocates."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.core.values import Message
from rasura.core.wire import MAGIC, Limits, WireError, from_bytes, mask_digest, to_bytes


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
    assert mask_digest({}) == hashlib.sha256().hexdigest()[:16]
    square = torch.eye(2, dtype=torch.bool)
    by_hand = hashlib.sha256(b"a\x00(2, 2)\x00" + bytes([0b10010000]) + b"b\x00(1,)\x00" + bytes([0b10000000]))
    assert mask_digest({"b": torch.ones(1, dtype=torch.bool), "a": square}) == by_hand.hexdigest()[:16]
    one, two = message().visible, message(1).visible
    assert mask_digest(one) == mask_digest(dict(reversed(list(one.items())))) != mask_digest(two)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a message, and what follows it."""
    (size,) = struct.unpack(">I", data[8:12])
    return json.loads(data[12 : 12 + size]), data[12 + size :]


def built(header: object, tail: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + struct.pack(">I", len(head)) + head + tail


def rebuilt(change: dict[str, object], tail: bytes | None = None) -> bytes:
    """The bytes of a message whose header was changed."""
    header, rest = parts(to_bytes(message()))
    for key, value in change.items():
        place = header
        *path, last = key.split("/")
        for step in path:
            place = place[step]
        place[last] = value
    return built(header, rest if tail is None else tail)


def one(shape: object, shown: object = 0, dtype: object = "float32", **more: object) -> bytes:
    """A message that announces one tensor and holds nothing of it."""
    told = {"shape": shape, "dtype": dtype, "shown": shown, **more}
    return built({"kind": "fedsgd", "header": {}, "tensors": {"w": told}, "sealed": []})


MALFORMED: list[tuple[bytes, str]] = [
    (built(b"{not}"), "not JSON"),
    (built(b"\xff\xfe{}"), "not JSON"),
    (built(b"[" * 100_000), "not JSON"),
    (built({"kind": "x"}), "its parts"),
    (built([]), "its parts"),
    (rebuilt({"more": 1}), "its parts"),
    (rebuilt({"kind": 3}), "its kind"),
    (rebuilt({"kind": "two\nlines"}), "its kind"),
    (rebuilt({"kind": "k" * 257}), "its kind"),
    (rebuilt({"header": []}), "what it tells"),
    (rebuilt({"header": {"a": [1]}}), "what it tells"),
    (rebuilt({"header": {"a": "\ud800"}}), "what it tells"),
    (rebuilt({"header": {"a\n": 1}}), "what it tells"),
    (rebuilt({"header": {"a": 1 << 62}}), "what it tells"),
    (rebuilt({"header": {"a": -(1 << 62)}}), "what it tells"),
    (built(b'{"kind": "x", "header": {"a": 1e999}, "tensors": {}, "sealed": []}'), "what it tells"),
    (built(b'{"kind": "x", "header": {"a": NaN}, "tensors": {}, "sealed": []}'), "not JSON"),
    (rebuilt({"tensors": []}), "its tensors"),
    (rebuilt({"tensors": {"a\tb": {}}}), "the name of a tensor"),
    (rebuilt({"tensors": {"a": {}}}), "the parts of a"),
    (rebuilt({"tensors": {"a": None}}), "the parts of a"),
    (one([1], hidden="none"), "the parts of w"),
    (one([1], dtype="int64"), "the kind of w"),
    (one([1], dtype=[]), "the kind of w"),
    (one(3), "the shape of w"),
    (one([1] * 17), "the shape of w"),
    (one([-2, 2]), "the shape of w"),
    (one([2.0]), "the shape of w"),
    (one([True]), "the shape of w"),
    (one([0, 10**30]), "the shape of w"),
    (one([0, 1 << 61, 1 << 61]), "the shape of w"),
    (one([1 << 62]), "the shape of w"),
    (one([1 << 31, 1 << 31]), "the shape of w"),
    (one([2, 3], shown=7), "the entries of w"),
    (one([2, 3], shown=-1), "the entries of w"),
    (one([2, 3], shown=None), "the entries of w"),
    (rebuilt({"sealed": {}}), "its ciphertexts"),
    (rebuilt({"sealed": [["x"]]}), "its ciphertexts"),
    (rebuilt({"sealed": [["x", 1, 2]]}), "its ciphertexts"),
    (rebuilt({"sealed": ["xy"]}), "its ciphertexts"),
    (rebuilt({"sealed": [["x", -1]]}), "its ciphertexts"),
    (rebuilt({"sealed": [["x", 1 << 62]]}), "its ciphertexts"),
    (rebuilt({"sealed": [[None, 1]]}), "its ciphertexts"),
    (rebuilt({"sealed": [["x", 6], ["x", 0]]}), "one name"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_header_is_refused_by_the_part_that_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=f"^the message's header is malformed: .*{reason}$") as caught:
        from_bytes(data)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a message of Rasura"),
        (b"garbage" * 9, "not a message of Rasura"),
        (MAGIC + b"\0\0\0", "not a message of Rasura"),
        (MAGIC + b"\0\0\0\0", "not JSON"),
        (MAGIC[:-1] + b"\x07" + to_bytes(message())[8:], "schema 7; this version reads 2$"),
        (MAGIC + b"\xff\xff\xff\xff" + b"x" * 50, "4294967295 bytes of header; at most 50 are"),
        (to_bytes(message())[:-1], "cut or added to"),
        (to_bytes(message()) + b"\0", "cut or added to"),
        (rebuilt({"tensors/c/shape": [1 << 20, 1 << 20]}), "entries; at most 2147483648 are"),
        (rebuilt({"tensors/a.weight/shape": [5, 9]}), "cut or added to"),
        (rebuilt({"tensors/b.bias/dtype": "float32"}), "cut or added to"),
        (rebuilt({"tensors/c/shown": 8}), "cut or added to"),
        (rebuilt({"sealed": [["x", 1 << 40]]}), "bytes of a ciphertext"),
        (one([1 << 31], shown=1 << 31), "cut or added to"),
        (one([1 << 31], shown=1), "cut or added to"),
        (one([1 << 20, 1 << 11, 2]), "4294967296 entries; at most"),
        (one([1] * 15 + [1 << 61]), "2305843009213693952 entries; at most"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        from_bytes(data)


def test_a_mask_has_as_many_bits_as_it_says() -> None:
    visible = torch.tensor([True, False, True, False, False])
    data = to_bytes(Message({"w": torch.tensor([1.0, 0, 2, 0, 0])}, {"w": visible}))
    header, tail = parts(data)
    assert tail[0] == 0b10100000 and header["tensors"]["w"] == {"shape": [5], "dtype": "float32", "shown": 2}
    assert same(Message({"w": torch.tensor([1.0, 0, 2, 0, 0])}, {"w": visible}), from_bytes(data))
    # One visible too many, one too few, one moved beyond the end.
    for bits in (0b11100000, 0b10000000, 0b10000100, 0b10100001):
        with pytest.raises(WireError, match="the mask of w shows another number of entries than the 2 that were sent"):
            from_bytes(built(header, bytes([bits]) + tail[1:]))


def test_announced_entries_that_do_not_travel_take_no_memory() -> None:
    small = one([1 << 16, 1 << 15])
    assert len(small) < 167
    found = from_bytes(small)
    assert found.gradients["w"].shape == (1 << 16, 1 << 15) and found.gradients["w"].dtype == torch.float32
    assert found.visible["w"].shape == (1 << 16, 1 << 15) and found.visible["w"].dtype == torch.bool
    assert found.gradients["w"].untyped_storage().nbytes() == 4 and found.visible["w"].untyped_storage().nbytes() == 1
    assert float(found.gradients["w"][5, 7]) == 0 and not bool(found.visible["w"][5, 7])


def test_what_a_receiver_would_refuse_is_not_sent() -> None:
    for wrong in (
        Message({}, header={"a": "two\nlines"}), Message({}, header={"a": float("nan")}), Message({}, kind="\n"),
        Message({"a\n": torch.ones(1)}), Message({"a": torch.ones([1] * 17)}), Message({}, {}, {"b" * 257: b""}),
    ):  # fmt: skip
        with pytest.raises(WireError, match="malformed"):
            to_bytes(wrong)
    with pytest.raises(InputError, match="w is int64; expected one of float32, float16, bfloat16, float64"):
        to_bytes(Message({"w": torch.tensor([1])}))


def test_numbers_that_are_none_never_enter_an_aggregate() -> None:
    for value in (float("nan"), float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            with pytest.raises(WireError, match="w holds entries that are not finite numbers"):
                from_bytes(to_bytes(Message({"w": torch.tensor([1.0, value], dtype=dtype)})))


def test_limits_are_the_receivers() -> None:
    data = to_bytes(message())
    size = struct.unpack(">I", data[8:12])[0]
    exact = Limits(len(data), size, 35 + 3 + 8 + 1, 5, 2, 6)
    assert same(message(), from_bytes(data, exact))
    for name, what in (
        ("total", "bytes"), ("header", "bytes of header"), ("entries", "entries"), ("tensors", "tensors"),
        ("ciphertexts", "ciphertexts"), ("ciphertext", "bytes of a ciphertext"),
    ):  # fmt: skip
        most = getattr(exact, name) - 1
        with pytest.raises(WireError, match=f"^the message has {most + 1} {what}; at most {most} are accepted$"):
            from_bytes(data, replace(exact, **{name: most}))


def test_the_usual_limits_are_those_of_the_documentation() -> None:
    assert Limits() == Limits(1 << 31, 1 << 22, 1 << 31, 1 << 16, 1 << 20, 1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_kind_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    gradient = torch.randn(3, 5, generator=generator(3)).to(dtype)
    for count in (0, 1, 7, 14, 15):
        visible = torch.randperm(15, generator=generator(count)).reshape(3, 5) < count
        sent = Message(
            {"w": gradient * visible}, {"w": visible}, header={"none": None, "true": True, "half": 0.5, "is": "a"}
        )
        data = to_bytes(sent)
        assert same(sent, from_bytes(data))
        assert len(parts(data)[1]) == count * dtype.itemsize + (2 if 0 < count < 15 else 0)
    for shape in ((), (0,), (4, 0), (1,) * 16):
        sent = Message({"w": torch.ones(shape, dtype=dtype)})
        assert same(sent, from_bytes(to_bytes(sent)))


def test_a_single_entry_may_be_hidden_and_a_name_is_as_long_as_it_may() -> None:
    for shape in ((), (1,), (1, 1)):
        hidden = Message({"w": torch.zeros(shape)}, {"w": torch.zeros(shape, dtype=torch.bool)})
        assert same(hidden, from_bytes(to_bytes(hidden)))
    assert mask_digest({"w": torch.tensor(True)}) == hashlib.sha256(b"w\x00()\x00\x80").hexdigest()[:16]
    long = Message({"w" * 256: torch.ones(1)}, header={"h" * 256: 1})
    assert same(long, from_bytes(to_bytes(long)))


def test_tensors_keep_their_order_and_their_own_memory() -> None:
    sent = Message({"b": torch.ones(2), "a": torch.full((3,), 2.0)}, {}, {"y": b"1", "x": b"23"})
    data = bytearray(to_bytes(sent))
    found = from_bytes(bytes(data))
    assert list(found.gradients) == ["b", "a"] and list(found.sealed.items()) == [("y", b"1"), ("x", b"23")]
    found.gradients["a"][0] = 5.0
    assert found.gradients["b"].tolist() == [1, 1] and data == to_bytes(sent)


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
