"""Keys and their files, parameters, quantised steps: by hand, at every boundary. No sum of many clients."""

from __future__ import annotations

import math
import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rasura.core.errors import InputError
from rasura.defenses import homomorphic_keys
from rasura.defenses.homomorphic import HALF, Sealed, added, opened_sum, quantise, seal
from rasura.defenses.homomorphic_keys import (
    CHOICES,
    LIMIT,
    Context,
    Parameters,
    Scheme,
    make_keys,
    parameters_for,
    server_context,
)

tenseal = pytest.importorskip("tenseal")


@pytest.fixture(scope="module")
def keys() -> Context:
    return make_keys(4)


@pytest.fixture(scope="module")
def nearly() -> Context:
    return make_keys(2, "ckks")


def opened(context: Context) -> Any:
    return tenseal.context_from(context.data, 1)


# --- parameters


def test_lanes_and_values_are_those_of_the_documentation() -> None:
    small, large = CHOICES["bfv"]
    (ckks,) = CHOICES["ckks"]
    assert (HALF, homomorphic_keys.BITS, homomorphic_keys.LANES, LIMIT) == (32767, 16, 2, 1 << 20)
    assert [(p.degree, p.moduli, p.plain, p.max_clients) for p in (small, large, ckks)] == [
        (4096, (55, 54), 274877816833, 4), (8192, (60, 60), 35184371613697, 64), (8192, (60, 40, 40), 40, 64),
    ]  # fmt: skip
    assert [(p.lane, p.values) for p in (small, large, ckks)] == [(18, 8190), (22, 16382), (22, 4095)]
    # The largest primes of 38 and 45 bits that are 1 modulo twice the degree; two lanes fit, with the sum of all clients.
    for p, bits in ((small, 38), (large, 45)):
        assert p.plain % (2 * p.degree) == 1 and p.plain.bit_length() == bits
        assert 2 * p.max_clients * HALF < 1 << p.lane and 1 << (2 * p.lane) <= 2**bits


def test_the_noise_budget_is_its_formula() -> None:
    small, large = CHOICES["bfv"]
    for p, clients in ((small, 1), (small, 4), (large, 64)):
        spread = math.sqrt(clients * (1 + 2 * p.degree / 3) / 12)
        assert p.noise_budget(clients) == pytest.approx(math.log2(2.0 ** p.moduli[0] / 2 / p.plain / (10 * spread)))
    assert small.noise_budget(4) == pytest.approx(7.76277, abs=1e-4) and CHOICES["ckks"][0].noise_budget(4) is None


def test_the_smallest_parameters_that_fit_are_taken() -> None:
    for clients, most in ((1, 4), (4, 4), (5, 64), (64, 64)):
        assert parameters_for(clients).max_clients == most and parameters_for(clients).scheme == "bfv"
    assert parameters_for(1, "ckks") == parameters_for(64, "ckks") == CHOICES["ckks"][0]
    for clients in (0, -1):
        with pytest.raises(InputError, match=rf"^sealing for {clients} clients; expected at least 1$"):
            parameters_for(clients)
    with pytest.raises(InputError, match=r"^the noise budget of ckks fits at most 64 clients, but 65 were requested$"):
        parameters_for(65, "ckks")
    with pytest.raises(InputError, match=r"^unknown scheme 'rsa'; known: bfv, ckks$"):
        parameters_for(2, "rsa")  # type: ignore[arg-type]


# --- keys


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_keys_hold_what_sums_need_and_nothing_more(scheme: Scheme, keys: Context, nearly: Context) -> None:
    secret = keys if scheme == "bfv" else nearly
    public = secret.public()
    for context, private in ((secret, True), (public, False)):
        inside = opened(context)
        assert context.secret == private == inside.is_private() == inside.has_secret_key() and inside.has_public_key()
        assert not inside.has_galois_keys() and not inside.has_relin_keys()
        assert context.parameters == CHOICES[scheme][0] and context.key == secret.key
        assert repr(context) == f"Context({scheme}, {'secret' if private else 'public'}, key {secret.key})"
    assert len(secret.key) == 16 and int(secret.key, 16) >= 0 and make_keys(2, scheme).key != secret.key
    if scheme == "ckks":
        assert opened(secret).global_scale == opened(public).global_scale == 2.0**40
    with pytest.raises(FrozenInstanceError):
        public.secret = True  # type: ignore[misc]
    assert server_context(public) is public


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_files_of_keys_come_back_and_open_what_was_sealed(
    scheme: Scheme, tmp_path: Path, keys: Context, nearly: Context
) -> None:
    secret = keys if scheme == "bfv" else nearly
    secret.save(tmp_path / "secret")
    secret.public().save(str(tmp_path / "public"))
    own, server = Context.load(tmp_path / "secret"), Context.load(str(tmp_path / "public"))
    assert own == secret and server == secret.public() and not server.secret
    sealed, beyond = seal(np.array([0.5, -2.0]), np.ones(2), server)
    assert beyond == 1 and opened_sum(added([sealed] * 2, server), np.ones(2), own) == pytest.approx([1, -2], abs=1e-4)
    head = (tmp_path / "secret").read_bytes().split(b"\n")[:2]
    assert head[0] == b"rasura keys 2" and head[1].split(b" ")[:3] == [
        scheme.encode(), b"%d" % secret.parameters.max_clients, secret.key.encode(),
    ]  # fmt: skip


def test_a_public_file_may_be_read_by_others_and_a_secret_one_not(tmp_path: Path, keys: Context) -> None:
    before = os.umask(0o022)
    try:
        keys.save(tmp_path / "secret")
        keys.public().save(tmp_path / "public")
    finally:
        os.umask(before)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o644
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(InputError, match=r"/secret holds a secret key that other users can read; run: chmod 600 "):
        Context.load(tmp_path / "secret")


def test_no_changed_byte_of_a_file_of_keys_reaches_the_library(tmp_path: Path, keys: Context) -> None:
    file = tmp_path / "public"
    keys.public().save(file)
    good = file.read_bytes()
    second = good.index(b"\n") + 1
    changed = {
        "magic": b"R" + good[1:], "schema": good.replace(b"keys 2", b"keys 3", 1),
        "clients": good.replace(b"bfv 4 ", b"bfv 5 ", 1), "scheme": good.replace(b"bfv", b"bfw", 1),
        "key": good.replace(keys.key.encode(), keys.key[::-1].encode(), 1),
        "digest": good[: second + 40] + b"x" + good[second + 41 :],
        "data": good[:-1] + bytes([good[-1] ^ 1]), "cut": good[:-1], "more": good + b"\0", "head": good[:second],
        "not text": good[:second] + b"\xff" + good[second + 1 :],
    }  # fmt: skip
    for name, content in changed.items():
        assert content != good, name
        file.write_bytes(content)
        with pytest.raises(
            InputError, match=r"does not hold keys of Rasura, or they are damaged; make new ones with rasura keys$"
        ):
            Context.load(file)
    file.write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(InputError, match=rf"the file of keys .* has more than {LIMIT} bytes"):
        Context.load(file)


# --- steps


def test_values_are_rounded_to_steps_and_cut_at_the_scale() -> None:
    scale = np.full(8, 2.0)
    step = 2.0 / HALF
    found = quantise(np.array([2.0, -2.0, 0.0, 1.4 * step, -1.6 * step, 2.0 + 0.4 * step, 2.0 + 0.6 * step, -3.0]), scale)
    assert found.steps.tolist() == [HALF, -HALF, 0, 1, -2, HALF, HALF, -HALF] and found.steps.dtype == np.int64
    assert found.beyond == 2
    with pytest.raises(InputError, match=r"^2 values are not finite numbers; nothing is sealed$"):
        quantise(np.array([1.0, np.inf, np.nan]), np.ones(3))
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(
            InputError, match=r"^a scale is not finite and above 0; expected the maximum absolute value of each entry$"
        ):
            quantise(np.ones(2), np.array([wrong, 1.0]))
    assert quantise(np.ones(1), np.full(1, 0.5)).steps.tolist() == [HALF]


def test_a_sealed_value_takes_as_many_bytes_as_documented(keys: Context, nearly: Context) -> None:
    for context, least, most in ((keys, 7.4, 7.7), (nearly, 56, 58)):
        count = context.parameters.values
        (ciphertext,) = seal(np.ones(count), np.ones(count), context.public())[0].ciphertexts
        assert least < len(ciphertext) / count < most


def test_a_sealed_sequence_is_one_clients(keys: Context) -> None:
    assert Sealed((b"x",)).clients == 1
    for count, ciphertexts in ((0, 0), (1, 1), (8190, 1), (8191, 2)):
        own = np.linspace(-1, 1, count)
        sealed, beyond = seal(own, np.ones(count), keys)
        assert len(sealed.ciphertexts) == ciphertexts and sealed.clients == 1 and beyond == 0
        found = opened_sum(sealed, np.ones(count), keys)
        assert found.shape == (count,) and found.dtype == np.float64 and np.abs(found - own).max(initial=0) <= 0.5 / HALF


def test_several_ciphertexts_keep_the_order(keys: Context) -> None:
    length = 4 * keys.parameters.values + 3
    own = np.random.default_rng(0).uniform(-1, 1, length)
    sealed, _ = seal(own, np.ones(length), keys.public())
    assert len(sealed.ciphertexts) == 5
    assert np.abs(opened_sum(sealed, np.ones(length), keys) - own).max() <= 0.5 / HALF


# --- what a server gets


def test_ciphertexts_of_a_wrong_size_are_refused_unread(keys: Context) -> None:
    public = keys.public()
    good, _ = seal(np.ones(10), np.ones(10), public)
    for length in (0, LIMIT + 1):
        with pytest.raises(InputError, match=rf"^ciphertext 1 has {length} bytes; expected 1 to {LIMIT}$"):
            added([Sealed((good.ciphertexts[0], b"x" * length))], public)
    for wrong in (b"x", b"x" * (LIMIT - 1)):
        for some in ([Sealed((wrong,))], [good, Sealed((wrong,))]):
            with pytest.raises(InputError, match=r"^ciphertext 0 cannot be read \(.+\)$"):
                added(some, public)
    narrow = tenseal.bfv_vector(opened(public), [1]).serialize()
    for wrong, slots in ((narrow, 1), (b"x" * LIMIT, 0)):
        with pytest.raises(InputError, match=rf"^ciphertext 0 holds {slots} slots; expected 4096 to 4096$"):
            added([Sealed((wrong,))], public)
    with pytest.raises(
        InputError, match=r"^clients sealed different numbers of ciphertexts: \[0, 1\]; expected the same number from each$"
    ):
        added([good, Sealed(())], public)
    nothing = added([Sealed(()), Sealed((), 2)], public)
    assert nothing == Sealed((), 3) and opened_sum(nothing, np.ones(0), keys).shape == (0,)


def test_bytes_that_the_library_takes_for_no_values_are_refused_and_do_not_crash_who_opens(nearly: Context) -> None:
    public = nearly.public()
    good, _ = seal(np.ones(1), np.ones(1), public)
    assert opened_sum(added([good], public), np.ones(1), nearly) == pytest.approx([1.0], abs=1e-3)
    full, _ = seal(np.ones(4095), np.ones(4095), public)
    assert opened_sum(added([full], public), np.ones(4095), nearly) == pytest.approx(1.0, abs=1e-3)
    single = tenseal.ckks_vector(opened(public), [1.0]).serialize()
    for wrong, slots in ((b"xy", 0), (single, 1)):
        for call in (lambda: added([Sealed((wrong,))], public), lambda: opened_sum(Sealed((wrong,)), np.ones(1), nearly)):  # noqa: B023
            with pytest.raises(InputError, match=rf"^ciphertext 0 holds {slots} slots; expected 2 to 4096$"):
                call()


def test_ciphertexts_that_do_not_add_are_refused_by_their_number(keys: Context, nearly: Context) -> None:
    public = nearly.public()
    good, _ = seal(np.ones(2), np.ones(2), public)
    other: Any = tenseal.ckks_vector(opened(public), [1.0] * 7)
    with pytest.raises(InputError, match=r"^ciphertext 0 does not fit the others \(.+\)$"):
        added([good, Sealed((other.serialize(),))], public)


def test_values_and_ciphertexts_that_do_not_agree_in_number_are_refused(keys: Context) -> None:
    sealed, _ = seal(np.ones(3), np.ones(3), keys)
    with pytest.raises(InputError, match=r"^0 values were sealed; expected 1$"):
        opened_sum(Sealed(()), np.ones(1), keys)
    with pytest.raises(InputError, match=r"^8190 values were sealed; expected 8191$"):
        opened_sum(sealed, np.ones(8191), keys)
    assert opened_sum(sealed, np.full(2, 3.0), keys).tolist() == [3.0, 3.0]


def test_other_parameters_than_the_usual_ones_are_possible() -> None:
    one = Parameters("bfv", 4096, (55, 54), 274877816833, 1)
    assert one.lane == 16 and Parameters("bfv", 4096, (55, 54), 274877816833, 5).lane == 19
