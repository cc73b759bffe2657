"""Update files of strangers: what is read, and what is refused in one line."""

from __future__ import annotations

import base64
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from audit_setting import causal_folder, model_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rasura.core.interfaces import InputError
from rasura.runs.reading import ReadRequest, read_update
from rasura.runs.update_files import load_hidden, load_update
from rasura.victims.loading import Victim, load

__all__ = ["causal_folder", "model_folder"]

NAME = "classifier.bias"


@pytest.fixture(scope="module")
def victim(model_folder: Path) -> Victim:
    return load(model_folder, "classification")


def refusal(read: Callable[..., object], path: Path, victim: Victim) -> str:
    with pytest.raises(InputError) as caught:
        read(path, victim)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_type_of_float_is_read(tmp_path: Path, victim: Victim, dtype: torch.dtype) -> None:
    save_file({NAME: torch.tensor([0.5, -2.0]).to(dtype)}, tmp_path / "u.safetensors")
    found = load_update(tmp_path / "u.safetensors", victim)[NAME]
    assert found.dtype == torch.float32 and found.tolist() == [0.5, -2.0]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.tensor([1e300, 0], dtype=torch.float64), "entries above 1e[+]?14"),
        (torch.tensor([1e30, 0.0]), "entries above"),
        (torch.tensor([float("nan"), 0.0]), "NaN or infinity"),
        (torch.tensor([float("nan"), 0.0]).to(torch.float8_e4m3fn), "NaN or infinity"),
        (torch.tensor([float("inf"), 0.0]).to(torch.float8_e5m2), "NaN or infinity"),
        (torch.tensor([1, 0]), "is int64; expected gradients"),
        (torch.tensor([1 + 1j, 0]), "is C64; expected gradients"),
        (torch.tensor([True, False]), "is bool"),
        (torch.zeros(3), r"has shape \(3,\), but the model's is \(2,\)"),
    ],
)
def test_what_is_no_gradient_is_refused(tmp_path: Path, victim: Victim, tensor: torch.Tensor, says: str) -> None:
    save_file({NAME: tensor}, tmp_path / "u.safetensors")
    with pytest.raises(InputError, match=says):
        load_update(tmp_path / "u.safetensors", victim)


def raw(header: str | dict[str, object], data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


ENTRY = json.dumps(entry([2], 8))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header is invalid"),
        (b"\x00" * 8, "not a safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header is invalid"),
        (raw({NAME: entry([10**12], 4 * 10**12)}), "not a safetensors file"),
        (raw({NAME: entry([0, 10**15], 0)}), "has the shape"),
        (raw(f'{{"{NAME}":{ENTRY},"{NAME}":{ENTRY}}}', b"\0" * 8), f"{NAME} occurs twice"),
        (raw("[" * 50_000), "not a safetensors file"),
        (raw({}), "holds no tensor"),
        (raw({"clasifier.bias": entry([2], 8)}, b"\0" * 8), "did you mean classifier.bias"),
        (
            pickle.dumps({NAME: [1.0]}),
            "is a pickle (or a file of torch.save before 1.6), which can run code and is never opened",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, victim: Victim, content: bytes, says: str) -> None:
    (tmp_path / "u.safetensors").write_bytes(content)
    assert says in refusal(load_update, tmp_path / "u.safetensors", victim)


@pytest.mark.parametrize(
    "name", ["cls.predictions.bias", "cls.seq_relationship.weight", "qa_outputs.bias", "lm_head.weight"]
)
def test_heads_of_other_tasks_are_left_out_and_not_renamed(tmp_path: Path, victim: Victim, name: str) -> None:
    """Any name of the model that is near would make an update that nobody computed."""
    whole = {n: torch.full_like(p, 0.1) for n, p in victim.model.named_parameters() if not n.startswith("classifier")}
    save_file({**whole, name: torch.zeros(2)}, path := tmp_path / "u.safetensors")
    said = refusal(load_update, path, victim)
    assert (
        f"{name}, of a head that the model does not have" in said
        and f"leave the tensors of {name.split('.')[0]} out of the file" in said
    )
    assert "did you mean" not in said
    save_file(whole, path)
    assert set(load_update(path, victim)) == set(whole)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_no_pickle_runs(tmp_path: Path, victim: Victim) -> None:
    sprung = tmp_path / "sprung"
    np.save(tmp_path / "a.npy", np.array([Trap(sprung)], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", **{NAME: np.array([Trap(sprung)], dtype=object)})  # type: ignore[arg-type]  # of numpy
    torch.save({NAME: torch.zeros(2), "trap": Trap(sprung)}, tmp_path / "a.pt")
    torch.save({NAME: torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "sent.txt").write_bytes(base64.b64encode(pickle.dumps(Trap(sprung))))
    expected = {
        "a.npy": "holds pickled Python objects", "a.npz": "holds pickled Python objects", "a.pt": "trap is not a tensor",
        "old.pt": "torch.save before 1.6", "sent.txt": "pickle in base64, as sent by FederatedScope",
    }  # fmt: skip
    for name, says in expected.items():
        for read in (load_update, load_hidden):
            assert says in refusal(read, tmp_path / name, victim)
    assert not sprung.exists()
    (tmp_path / "empty").mkdir()
    assert "is a folder without weights" in refusal(load_update, tmp_path / "empty", victim)


def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path: Path, victim: Victim) -> None:
    header = json.dumps({NAME: entry([2], 8)})
    (tmp_path / "u.safetensors").write_bytes(raw(header.ljust(0x280), struct.pack("<2f", 0.5, -2.0)))
    assert (tmp_path / "u.safetensors").read_bytes().startswith(b"\x80\x02")
    assert load_update(tmp_path / "u.safetensors", victim)[NAME].tolist() == [0.5, -2.0]


def test_hidden_entries_are_bool(tmp_path: Path, victim: Victim) -> None:
    save_file({NAME: torch.tensor([True, False])}, tmp_path / "h.safetensors")
    assert load_hidden(tmp_path / "h.safetensors", victim)[NAME].tolist() == [False, True]
    save_file({NAME: torch.zeros(2)}, tmp_path / "h.safetensors")
    assert "is float32; expected bool" in refusal(load_hidden, tmp_path / "h.safetensors", victim)


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda: ReadRequest("spam"), "did you mean span"),
        (lambda: ReadRequest(batch_size=0), "batch size is 0; expected at least 1"),
        (lambda: ReadRequest(dropout=1.0), "dropout is 1.0; expected at least 0 and less than 1"),
        (lambda: ReadRequest(labels=[0, 1], batch_size=1), "2 labels for a batch of 1; give one for each text"),
        (lambda: ReadRequest(labels=[0, 1], lengths=[4]), "2 labels for a batch of 1; give one for each text"),
        (lambda: ReadRequest(labels=[0.5]), "labels are not whole numbers"),  # type: ignore[list-item]  # on purpose
        (lambda: ReadRequest(labels="01"), "labels are not whole numbers"),  # type: ignore[arg-type]  # on purpose
        (lambda: ReadRequest(lengths=4), "lengths are not whole numbers"),  # type: ignore[arg-type]  # on purpose
        (lambda: ReadRequest(update="lora:2"), "pass the folder of the adapter"),
        (lambda: ReadRequest(update="fedavg"), "unknown update"),
    ],
)
def test_what_cannot_be_asked_is_refused_when_it_is_asked(request_of: Callable[[], ReadRequest], says: str) -> None:
    with pytest.raises(InputError, match=says):
        request_of()


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"labels": [2]}, "label 2 is none of the classes 0 .. 1 of .*; they are counted from 0"),
        ({"labels": [1, 2]}, "label 2 is none of the classes 0 .. 1 of .*; they are counted from 0"),
        ({"labels": [0, 2]}, "label 2 is none of the classes 0 .. 1 of "),
        ({"labels": [-1]}, "label -1 is none of the classes"),
        ({"lengths": [0]}, "length 0 is that of no text of .*expected 3 .. 64 tokens, 2 of them the tokenizer's own"),
        ({"lengths": [5, -3]}, "length -3 is that of no text"),
        ({"lengths": [2]}, "length 2 is that of no text"),
        ({"lengths": [500]}, "length 500 is that of no text"),
    ],
)
def test_what_no_text_of_the_model_has_is_refused(
    tmp_path: Path, victim: Victim, known: dict[str, list[int]], says: str
) -> None:
    """A class counted from 1 ended in an IndexError; a length without words, in an empty text."""
    save_file({NAME: torch.tensor([0.5, -2.0])}, tmp_path / "u.safetensors")
    with pytest.raises(InputError, match=says):
        read_update(tmp_path / "u.safetensors", victim, ReadRequest("blind", **known))  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [{"labels": [0]}, {"labels": [1]}, {"lengths": [3]}, {"lengths": [64]}])
def test_what_a_text_of_the_model_may_have_is_read(tmp_path: Path, victim: Victim, known: dict[str, list[int]]) -> None:
    save_file({NAME: torch.tensor([0.5, -2.0])}, tmp_path / "u.safetensors")
    assert read_update(tmp_path / "u.safetensors", victim, ReadRequest("blind", **known)).status == "ok"  # type: ignore[arg-type]


def test_a_text_without_classes_has_no_label(tmp_path: Path, causal_folder: Path) -> None:
    save_file({"transformer.ln_f.bias": torch.ones(64)}, tmp_path / "u.safetensors")
    with pytest.raises(InputError, match="the task is causal, whose texts have no classes; leave them out"):
        read_update(tmp_path / "u.safetensors", load(causal_folder, "causal"), ReadRequest("blind", labels=[0]))


def test_what_is_read_is_a_value_with_a_plain_form(tmp_path: Path, victim: Victim) -> None:
    save_file({NAME: torch.tensor([0.5, -2.0])}, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest("blind", lengths=[5]))
    plain = found.to_dict()
    assert list(plain) == [
        "texts",
        "confidence",
        "attack",
        "tokens",
        "file",
        "ordered",
        "labels",
        "notes",
        "seconds",
        "details",
    ]
    assert json.loads(json.dumps(plain)) == plain and plain["texts"] == list(found.texts) != []
    assert (found.status, found.reason, found.attack, found.seconds) == ("ok", "", "blind", plain["seconds"])


def test_an_update_without_a_visible_entry_is_not_read(tmp_path: Path, victim: Victim) -> None:
    save_file({NAME: torch.tensor([0.5, -2.0])}, tmp_path / "u.safetensors")
    save_file({NAME: torch.tensor([True, True])}, tmp_path / "h.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest(hidden=tmp_path / "h.safetensors"))
    assert (found.status, found.texts) == ("not_applicable", ())
    count = len(list(victim.model.parameters()))
    assert found.to_dict() == {
        "texts": [], "confidence": "none", "attack": "best", "tokens": [], "seconds": None,
        "file": [f"u.safetensors: safetensors, 1 of the model's {count} parameters"],
        "reason": "every entry of the update is hidden, so there is nothing to read",
    }  # fmt: skip


@pytest.mark.parametrize("hidden", [False, True])
def test_an_update_of_zeros_is_refused_before_any_attack(hidden: bool, tmp_path: Path, victim: Victim) -> None:
    save_file({NAME: torch.tensor([0.5 * hidden, -0.0])}, tmp_path / "u.safetensors")
    save_file({NAME: torch.tensor([True, False])}, tmp_path / "h.safetensors")
    request = ReadRequest(hidden=tmp_path / "h.safetensors" if hidden else None)
    with pytest.raises(InputError, match=r"every (visible )?entry of the update is zero, so nothing can be read from it"):
        read_update(tmp_path / "u.safetensors", victim, request)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_raise_nothing_but_input_errors(
    tmp_path_factory: pytest.TempPathFactory, victim: Victim, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    content = bytearray(raw({NAME: entry([2], 8)}, struct.pack("<2f", 0.5, -2.0)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not content:
            break
    path.write_bytes(bytes(content))
    for read in (load_update, load_hidden):
        try:
            found = read(path, victim)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert all(bool(torch.isfinite(t.float()).all()) for t in found.values())
