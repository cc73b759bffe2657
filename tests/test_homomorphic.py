"""Sealing: exact sums of many clients, keys that stay secret, and what a server must survive."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import rasura_command, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from rasura.core.interfaces import InputError
from rasura.defenses.homomorphic import HALF, Sealed, added, opened_sum, quantise, seal
from rasura.defenses.homomorphic_keys import CHOICES, Context, Parameters, Scheme, make_keys, parameters_for, server_context

pytest.importorskip("tenseal")

COUNT = 20_000


@pytest.fixture(scope="module")
def keys() -> Context:
    return make_keys(4)


def values(client: int, count: int = COUNT) -> np.ndarray:
    rng = np.random.default_rng(client)
    return rng.standard_normal(count) * 10 ** rng.uniform(-6, 0, count)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 4, 64])
def test_the_sum_of_sealed_values_is_the_plain_sum_to_the_step(clients: int) -> None:
    secret = make_keys(clients)
    scale = np.repeat([3.0, 6.0], COUNT // 2)
    sent = [values(k) for k in range(clients)]
    sealed = [seal(v, scale, secret.public()) for v in sent]
    total = opened_sum(added([s for s, _ in sealed], secret.public()), scale, secret)
    exact = sum(quantise(v, scale).steps for v in sent) * scale / HALF
    assert np.array_equal(total, exact), "nothing but the quantisation is lost"
    cut = [np.clip(v, -scale, scale) for v in sent]
    assert (np.abs(total - sum(cut)) <= clients * scale / HALF / 2 + 1e-12).all()
    assert [beyond for _, beyond in sealed] == [int((np.abs(np.rint(v / scale * HALF)) > HALF).sum()) for v in sent]


def test_extreme_values_stay_in_their_lane(keys: Context) -> None:
    scale = np.ones(COUNT)
    for value in (1.0, -1.0, 1e9, -1e9):
        sealed, beyond = seal(np.full(COUNT, value), scale, keys)
        total = opened_sum(added([sealed] * 4, keys.public()), scale, keys)
        assert np.allclose(total, 4 * np.sign(value)) and beyond == (COUNT if abs(value) > 1 else 0)


def test_ckks_adds_nearly(keys: Context) -> None:
    secret = make_keys(3, "ckks")
    scale = np.full(5000, 2.0)
    sent = [np.clip(values(k, 5000), -2, 2) for k in range(3)]
    total = opened_sum(added([seal(v, scale, secret)[0] for v in sent], secret.public()), scale, secret)
    assert np.abs(total - sum(sent)).max() <= 3 * 2 / HALF
    bfv = sum(map(len, seal(sent[0], scale, keys)[0].ciphertexts))
    assert sum(map(len, seal(sent[0], scale, secret)[0].ciphertexts)) > 5 * bfv


def test_encryption_is_randomised_and_packed(keys: Context) -> None:
    scale = np.full(57_330, 2.0)
    one, other = (seal(values(0, 57_330), scale, keys.public())[0] for _ in range(2))
    assert not set(one.ciphertexts) & set(other.ciphertexts)
    assert np.array_equal(opened_sum(one, scale, keys), opened_sum(other, scale, keys))
    size = sum(map(len, one.ciphertexts)) / 57_330
    assert size < 7.7, f"{size} bytes a value"


SCRIPT = """
import torch
from rasura.core.rng import generator
from rasura.core.values import Message
from rasura.defenses.sealing import Sealing, sealing

torch.set_num_threads(2)
model = torch.nn.Linear(300, 400)
part = sealing(Sealing("all", scheme="bfv"))
update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
sent, _ = part.apply(Message(update), part.init((model, {})), generator(0))
print(len(sent.sealed))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_seals(tmp_path: Path) -> None:
    """Processes that start by importing the script anew would run its training again, and fail."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == -(-120_400 // make_keys(4).parameters.values)


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
    with pytest.raises(InputError, match="other users can read"):
        Context.load(tmp_path / "secret.keys")
    for content in (b"", b"rasura keys 1\nbfv 4 0\nnonsense", b"x" * 100):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(InputError, match="does not hold keys of Rasura"):
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
    with pytest.raises(InputError, match="the server could decrypt"):
        added([sealed], keys)
    with pytest.raises(InputError, match="the server could decrypt"):
        server_context(Context(keys.parameters, False, keys.key, keys.data))
    with pytest.raises(InputError, match="cannot decrypt"):
        opened_sum(sealed, np.ones(3), keys.public())


def test_malformed_ciphertexts_are_refused_with_a_reason(keys: Context) -> None:
    good, _ = seal(np.ones(10), np.ones(10), keys)
    public = keys.public()
    for bad in (b"", b"garbage", good.ciphertexts[0][:-9], b"x" * (1 << 21)):
        with pytest.raises(InputError, match="ciphertext 0"):
            added([good, Sealed((bad,))], public)
    other: Scheme = "ckks"
    for context in (make_keys(64), make_keys(2, other)):
        foreign, _ = seal(np.ones(10), np.ones(10), context)
        with pytest.raises(InputError, match="ciphertext 0"):
            added([good, foreign], public)
    with pytest.raises(InputError, match="different numbers"):
        added([good, Sealed(good.ciphertexts * 2)], public)
    with pytest.raises(InputError, match="fit 1 to 4"):
        added([good] * 5, public)


# --- the number of clients is bound to the ciphertexts


COUNTING = np.array([0.5, -1.0, 1.0, 0.25])


@pytest.fixture(scope="module", params=["bfv", "ckks"])
def counting(request: pytest.FixtureRequest) -> tuple[Context, Context, list[Sealed]]:
    """Keys, the server's, and one client's values at every size."""
    secret = make_keys(4, request.param)
    public = secret.public()
    one = seal(COUNTING, np.ones(4), public)[0]
    sums = [one]
    for _ in range(5):
        # What a server may do that tells fewer than it adds.
        sums.append(replace(added([replace(sums[-1], clients=1), one], public), clients=len(sums) + 1))
    return secret, public, sums


@settings(max_examples=60, deadline=None)
@given(held=st.integers(1, 6), said=st.integers(-1, 8))
def test_a_sum_opens_as_that_of_its_own_clients_or_not_at_all(
    counting: tuple[Context, Context, list[Sealed]], held: int, said: int
) -> None:
    secret, _, sums = counting
    told = replace(sums[held - 1], clients=said)
    most = secret.parameters.max_clients
    if said == held <= most:
        assert opened_sum(told, np.ones(4), secret) == pytest.approx(held * COUNTING, abs=2 * held / HALF)
        return
    with pytest.raises(
        InputError, match=f"fit 1 to {most}" if not 1 <= said <= most else f"is the sum of {held} clients, not"
    ):
        opened_sum(told, np.ones(4), secret)


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_counts_add_up_with_the_sums_in_any_grouping(
    counting: tuple[Context, Context, list[Sealed]], parts: list[int]
) -> None:
    secret, public, sums = counting
    told = [sums[k - 1] for k in parts]
    if sum(parts) > secret.parameters.max_clients:
        with pytest.raises(InputError, match=f"{sum(parts)} clients are to be added, but these keys fit 1 to"):
            added(told, public)
        return
    total = added(told, public)
    assert total.clients == sum(parts)
    assert opened_sum(total, np.ones(4), secret) == pytest.approx(sum(parts) * COUNTING, abs=2 * sum(parts) / HALF)


def test_ninety_six_clients_under_keys_for_64_do_not_open() -> None:
    secret = make_keys(64)
    public = secret.public()
    one, _ = seal(np.full(3, 0.1), np.ones(3), public)
    half = added([one] * 48, public)
    with pytest.raises(InputError, match="96 clients are to be added, but these keys fit 1 to 64"):
        added([half, half], public)
    both = added([replace(half, clients=1), replace(half, clients=1)], public)
    for said in (2, 64):
        with pytest.raises(InputError, match=f"is the sum of 96 clients, not of {said} as claimed"):
            opened_sum(replace(both, clients=said), np.ones(3), secret)
    with pytest.raises(InputError, match="a sum of 96 clients, but these keys fit 1 to 64"):
        opened_sum(replace(both, clients=96), np.ones(3), secret)


def test_every_ciphertext_counts_for_itself(keys: Context) -> None:
    public, scale = keys.public(), np.ones(keys.parameters.values + 1)
    one, _ = seal(scale / 2, scale, public)
    two = added([one, one], public)
    assert len(one.ciphertexts) == 2
    mixed = Sealed((two.ciphertexts[0], one.ciphertexts[1]), 2)
    with pytest.raises(InputError, match="ciphertext 1 is the sum of 1 clients, not of 2"):
        opened_sum(mixed, scale, keys)
    assert opened_sum(two, scale, keys) == pytest.approx(scale, abs=2 / HALF)
    with pytest.raises(
        InputError, match=f"{2 * keys.parameters.values} values were sealed; expected {2 * keys.parameters.values + 5}"
    ):
        opened_sum(two, np.ones(2 * keys.parameters.values + 5), keys)


def test_what_was_sealed_under_another_key_or_changed_does_not_open(keys: Context) -> None:
    tenseal = pytest.importorskip("tenseal")
    foreign, _ = seal(COUNTING, np.ones(4), make_keys(4))
    with pytest.raises(InputError, match="not of 1 as claimed"):
        opened_sum(foreign, np.ones(4), keys)
    context = tenseal.context_from(keys.public().data, 1)
    slots = [0] * keys.parameters.degree
    for place, value, good in ((1, 2 * HALF, True), (1, 2 * HALF + 1, False), (7, 1 << keys.parameters.lane, True),
                               (7, (2 * HALF + 1) << keys.parameters.lane, False), (9, 1 << 37, False)):  # fmt: skip
        own = [1, *slots[1:]]
        own[place] = value
        made = Sealed((tenseal.bfv_vector(context, own).serialize(),))
        if good:
            assert opened_sum(made, np.ones(4), keys).shape == (4,)
        else:
            with pytest.raises(InputError, match="values that are impossible for 1 clients"):
                opened_sum(made, np.ones(4), keys)


def test_values_that_so_many_clients_cannot_have_do_not_open(counting: tuple[Context, Context, list[Sealed]]) -> None:
    """CKKS opened a sum of which one client had sealed a million times the agreed scale."""
    tenseal = pytest.importorskip("tenseal")
    secret, public, _ = counting
    bfv, context = secret.parameters.scheme == "bfv", tenseal.context_from(public.data, 1)
    zeros, _ = seal(np.zeros(4), np.ones(4), public)
    below = () if bfv else ((-2 * HALF, True), (-2 * HALF - 1, False))  # no lane of BFV is below zero
    for steps, good in ((2 * HALF, True), (2 * HALF + 1, False), (100 * HALF, False), *below):
        slots = [1, *[HALF + steps] * (secret.parameters.degree - 1)] if bfv else [1.0, *[float(steps)] * 4]
        changed = (tenseal.bfv_vector if bfv else tenseal.ckks_vector)(context, slots)
        total = added([zeros, Sealed((changed.serialize(),))], public)
        if good:
            assert opened_sum(total, np.ones(4), secret) == pytest.approx(np.full(4, steps / HALF))
        else:
            with pytest.raises(
                InputError, match="ciphertext 0 holds values that are impossible for 2 clients; it was changed"
            ):
                opened_sum(total, np.ones(4), secret)


@pytest.mark.parametrize("clients", [0, -1, 5])
def test_counts_that_no_keys_fit_are_refused(keys: Context, clients: int) -> None:
    good, _ = seal(COUNTING, np.ones(4), keys)
    for call in (
        lambda: added([replace(good, clients=clients)], keys.public()),
        lambda: opened_sum(replace(good, clients=clients), np.ones(4), keys),
    ):
        with pytest.raises(InputError, match=f"a sum of {clients} clients, but these keys fit 1 to 4"):
            call()
    with pytest.raises(InputError, match="the values of 0 clients"):
        added([], keys.public())


def test_more_clients_than_fit_and_values_that_are_none() -> None:
    assert parameters_for(4).degree == 4096 and parameters_for(5).degree == 8192
    with pytest.raises(InputError, match="fits at most 64 clients, but 65 were requested"):
        parameters_for(65)
    with pytest.raises(InputError, match="unknown scheme"):
        parameters_for(2, "rot13")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="1 values are not finite"):
        quantise(np.array([1.0, np.nan]), np.ones(2))
    keys = make_keys(2)
    sealed, _ = seal(np.ones(2), np.ones(2), keys)
    for scale in (0.0, -1.0, np.inf, np.nan):
        for call in (lambda s: quantise(np.ones(2), s), lambda s: opened_sum(sealed, s, keys)):
            with pytest.raises(InputError, match="not finite and above 0"):
                call(np.array([1.0, scale]))


def test_the_command_makes_both_files_and_never_prints_a_key(tmp_path: Path) -> None:
    done = rasura_command("keys", tmp_path / "keys", "--clients", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    secret, public = Context.load(told["secret"]), Context.load(told["public"])
    assert secret.secret and not public.secret and secret.key == public.key == told["key"] and told["clients"] == 4
    assert "not overwritten" in refused("keys", tmp_path / "keys")
    for scheme, there in (("bfv", "server.public"), ("identity", "identities.public")):
        (tmp_path / there).write_text("of another key")
        assert f"{there} already exists and is not overwritten" in refused("keys", tmp_path, "--scheme", scheme)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["identities.public", "server.public"]
    assert "cannot be made" in refused("keys", tmp_path / "server.public" / "keys")
    assert "fits at most 64 clients" in refused("keys", tmp_path / "other", "--clients", "100")
    plain = rasura_command("keys", tmp_path / "third")
    assert len(plain.stdout) < 500 and "clients.secret" in plain.stdout


@pytest.mark.parametrize("parameters", CHOICES["bfv"], ids=lambda p: str(p.degree))
def test_the_noise_budget_says_where_sums_break(parameters: Parameters) -> None:
    tenseal = pytest.importorskip("tenseal")
    assert 1 < parameters.noise_budget(parameters.max_clients) < parameters.noise_budget(1)
    context = tenseal.context(
        tenseal.SCHEME_TYPE.BFV, parameters.degree, parameters.plain, coeff_mod_bit_sizes=list(parameters.moduli)
    )
    values = np.arange(parameters.degree)
    total, copies = tenseal.bfv_vector(context, values.tolist()), 1
    right = {}
    while copies < 2**13:
        # A ciphertext added to itself: its noise doubles, as that of four times as many clients would.
        total, copies = total + total, 2 * copies
        budget = parameters.noise_budget(copies**2)
        assert budget is not None
        right[budget] = bool((np.asarray(total.decrypt()) % parameters.plain == values * copies % parameters.plain).all())
    assert all(good for budget, good in right.items() if budget >= 0)
    assert not any(good for budget, good in right.items() if budget < -3)
    assert min(right) < -3 and max(right) > 0
