"""Sealing: exact sums of many clients, keys that stay secret, and what a server must survive."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from test_cli import rasura_command, refused

from rasura.defenses.homomorphic import (
    CHOICES,
    HALF,
    Context,
    Parameters,
    Scheme,
    added,
    make_keys,
    opened_sum,
    parameters_for,
    quantise,
    seal,
    server_context,
)
from rasura.interfaces import InputError

pytest.importorskip("tenseal")

COUNT = 20_000


@pytest.fixture(scope="module")
def keys() -> Context:
    return make_keys(4)


def values(client: int, count: int = COUNT) -> np.ndarray:
    rng = np.random.default_rng(client)
    return rng.standard_normal(count) * 10 ** rng.uniform(-6, 0, count)


@pytest.mark.parametrize("clients", [1, 4, 64])
def test_the_sum_of_sealed_values_is_the_plain_sum_to_the_step(clients: int) -> None:
    secret = make_keys(clients)
    scale = np.repeat([3.0, 6.0], COUNT // 2)
    sent = [values(k) for k in range(clients)]
    sealed = [seal(v, scale, secret.public()) for v in sent]
    total = opened_sum(added([s for s, _ in sealed], secret.public()), scale, clients, secret)
    exact = sum(quantise(v, scale).steps for v in sent) * scale / HALF
    assert np.array_equal(total, exact), "nothing but the quantisation is lost"
    cut = [np.clip(v, -scale, scale) for v in sent]
    assert (np.abs(total - sum(cut)) <= clients * scale / HALF / 2 + 1e-12).all()
    assert [beyond for _, beyond in sealed] == [int((np.abs(np.rint(v / scale * HALF)) > HALF).sum()) for v in sent]


def test_extreme_values_stay_in_their_lane(keys: Context) -> None:
    scale = np.ones(COUNT)
    for value in (1.0, -1.0, 1e9, -1e9):
        sealed, beyond = seal(np.full(COUNT, value), scale, keys)
        total = opened_sum(added([sealed] * 4, keys.public()), scale, 4, keys)
        assert np.allclose(total, 4 * np.sign(value)) and beyond == (COUNT if abs(value) > 1 else 0)


def test_ckks_adds_nearly(keys: Context) -> None:
    secret = make_keys(3, "ckks")
    scale = np.full(5000, 2.0)
    sent = [np.clip(values(k, 5000), -2, 2) for k in range(3)]
    total = opened_sum(added([seal(v, scale, secret)[0] for v in sent], secret.public()), scale, 3, secret)
    assert np.abs(total - sum(sent)).max() <= 3 * 2 / HALF
    bfv = sum(map(len, seal(sent[0], scale, keys)[0]))
    assert sum(map(len, seal(sent[0], scale, secret)[0])) > 5 * bfv


def test_processes_encrypt_what_one_does(keys: Context) -> None:
    scale = np.full(57_344, 2.0)
    sealed, _ = seal(values(0, 57_344), scale, keys.public(), processes=2)
    alone, _ = seal(values(0, 57_344), scale, keys.public())
    assert len(sealed) == len(alone) and sealed != alone, "encryption is randomised"
    assert np.array_equal(opened_sum(sealed, scale, 1, keys), opened_sum(alone, scale, 1, keys))
    size = sum(map(len, alone)) / 57_344
    assert size < 7.7, f"{size} bytes a value"


def test_keys_are_files_that_only_their_owner_reads(tmp_path: Path, keys: Context) -> None:
    keys.save(tmp_path / "secret.keys")
    keys.public().save(tmp_path / "public.keys")
    assert (tmp_path / "secret.keys").stat().st_mode & 0o777 == 0o600
    again = Context.load(tmp_path / "secret.keys")
    assert again == keys and not Context.load(tmp_path / "public.keys").secret
    assert str(keys.data[:8]) not in repr(keys) and "secret" in repr(keys)
    with pytest.raises(InputError, match="not overwritten"):
        keys.save(tmp_path / "secret.keys")
    (tmp_path / "secret.keys").chmod(0o644)
    with pytest.raises(InputError, match="others can read"):
        Context.load(tmp_path / "secret.keys")
    for content in (b"", b"rasura keys 1\nbfv 4 0\nnonsense", b"x" * 100):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(InputError, match="no keys of Rasura"):
            Context.load(tmp_path / "broken")
    with pytest.raises(InputError, match="cannot be read"):
        Context.load(tmp_path / "nothing")


def test_without_tenseal_the_extra_is_named_and_not_the_file(
    tmp_path: Path, keys: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.save(tmp_path / "secret.keys")
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(InputError, match=r"rasura\[encryption\]"):
        Context.load(tmp_path / "secret.keys")


def test_a_server_with_a_secret_key_is_refused(keys: Context) -> None:
    sealed, _ = seal(np.ones(3), np.ones(3), keys)
    with pytest.raises(InputError, match="the server could open"):
        added([sealed], keys)
    with pytest.raises(InputError, match="the server could open"):
        server_context(Context(keys.parameters, False, keys.key, keys.data))
    with pytest.raises(InputError, match="cannot open"):
        opened_sum(sealed, np.ones(3), 1, keys.public())


def test_malformed_ciphertexts_are_refused_with_a_reason(keys: Context) -> None:
    good, _ = seal(np.ones(10), np.ones(10), keys)
    public = keys.public()
    for bad in (b"", b"garbage", good[0][:-9], b"x" * (1 << 21)):
        with pytest.raises(InputError, match="ciphertext 0"):
            added([good, [bad]], public)
    other: Scheme = "ckks"
    for context in (make_keys(64), make_keys(2, other)):
        foreign, _ = seal(np.ones(10), np.ones(10), context)
        with pytest.raises(InputError, match="ciphertext 0"):
            added([good, foreign], public)
    with pytest.raises(InputError, match="different counts"):
        added([good, good + good], public)
    with pytest.raises(InputError, match="fit 1 to 4"):
        added([good] * 5, public)


def test_more_clients_than_fit_and_values_that_are_none() -> None:
    assert parameters_for(4).degree == 4096 and parameters_for(5).degree == 8192
    with pytest.raises(InputError, match="fits 64 clients, found 65"):
        parameters_for(65)
    with pytest.raises(InputError, match="unknown scheme"):
        parameters_for(2, "rot13")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="1 values are no finite"):
        quantise(np.array([1.0, np.nan]), np.ones(2))
    with pytest.raises(InputError, match="not above 0"):
        quantise(np.ones(2), np.array([1.0, 0.0]))


def test_the_command_makes_both_files_and_never_prints_a_key(tmp_path: Path) -> None:
    done = rasura_command("keys", tmp_path / "keys", "--clients", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    secret, public = Context.load(told["secret"]), Context.load(told["public"])
    assert secret.secret and not public.secret and secret.key == public.key == told["key"] and told["clients"] == 4
    assert "not overwritten" in refused("keys", tmp_path / "keys")
    assert "fits 64 clients" in refused("keys", tmp_path / "other", "--clients", "100")
    plain = rasura_command("keys", tmp_path / "third")
    assert len(plain.stdout) < 500 and "clients.secret" in plain.stdout


@pytest.mark.parametrize("parameters", CHOICES["bfv"], ids=lambda p: str(p.degree))
def test_the_noise_budget_says_where_sums_break(parameters: Parameters) -> None:
    tenseal = pytest.importorskip("tenseal")
    assert 1 < parameters.noise_budget(parameters.most) < parameters.noise_budget(1)
    context = tenseal.context(
        tenseal.SCHEME_TYPE.BFV, parameters.degree, parameters.plain, coeff_mod_bit_sizes=list(parameters.moduli)
    )
    values = np.arange(parameters.degree)
    total, copies = tenseal.bfv_vector(context, values.tolist()), 1
    right = {}
    while copies < 2**13:
        # A ciphertext added to itself: its noise doubles, as that of four times as many clients would.
        total, copies = total + total, 2 * copies
        right[parameters.noise_budget(copies**2)] = bool(
            (np.asarray(total.decrypt()) % parameters.plain == values * copies % parameters.plain).all()
        )
    assert all(good for budget, good in right.items() if budget >= 0)
    assert not any(good for budget, good in right.items() if budget < -3)
    assert min(right) < -3 and max(right) > 0
