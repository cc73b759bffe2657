"""Update files as frameworks write them, each by the library itself where it is installed: what was sent is what is read."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_setting import model_folder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from rasura.core.interfaces import InputError
from rasura.runs.reading import ReadRequest, adapter_among, read_update
from rasura.runs.update_files import holding, load_update, of_round, open_update
from rasura.runs.update_files.before import check_update
from rasura.runs.update_files.sources import opened
from rasura.testing.tiny import tiny
from rasura.victims.loading import Victim, load

peft = pytest.importorskip("peft")

__all__ = ["model_folder"]


@pytest.fixture(scope="module")
def adapter_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_adapter(model_folder, tmp_path_factory.mktemp("adapter"))


def saved_adapter(model_folder: Path, folder: Path, **options: Any) -> Path:
    """A PEFT adapter as PEFT saves it, with both matrices drawn at random, as they are from the second round on."""
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4, **options)
    model = peft.get_peft_model(load(model_folder, "classification").model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    model.save_pretrained(folder)
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": str(model_folder)}))
    return folder


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> Victim:
    return load(model_folder, "classification")


@pytest.fixture(scope="module")
def adapted(adapter_folder: Path) -> Victim:
    return load(adapter_folder, "classification")


def sent(victim: Victim, seed: int = 0) -> dict[str, Tensor]:
    """An update of every trainable parameter, by name."""
    generator = torch.Generator().manual_seed(seed)
    trainable = ((n, p) for n, p in victim.model.named_parameters() if p.requires_grad)
    return {n: torch.randn(p.shape, generator=generator) for n, p in trainable}


def check(path: Path, victim: Victim, expected: Mapping[str, Tensor], *, near: float = 0.0, **more: Any) -> tuple[str, ...]:
    """Each tensor is read under its parameter's name; the notes."""
    found = open_update(path, victim, **more)
    assert set(found.entries) == set(expected)
    for name, tensor in expected.items():
        wanted = tensor.float()
        assert found.entries[name].dtype == torch.float32
        assert float((found.entries[name] - wanted).abs().max()) <= near * float(wanted.abs().max()), name
    return found.notes


def peft_names(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names in PEFT's files: without the adapter's."""
    return {n.replace(".default.", ".").replace(".modules_to_save.", "."): t for n, t in entries.items()}


def peft_state(victim: Victim, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What PEFT gives for a model that holds ``entries``, in its order."""
    whole = {**victim.model.state_dict(), **entries}
    return dict(peft.get_peft_model_state_dict(victim.model, state_dict=whole))


def test_peft_files_have_no_adapter_name(tmp_path: Path, adapted: Victim) -> None:
    update = sent(adapted)
    state = peft_state(adapted, update)
    assert not any(".default" in n for n in state) and set(state) == set(peft_names(update))
    save_file(state, tmp_path / "adapter_model.safetensors")
    notes = check(tmp_path / "adapter_model.safetensors", adapted, update)
    assert any("was matched to" in note and "lora_A.default.weight" in note for note in notes)
    assert check(tmp_path, adapted, update) == notes  # the folder of the file


def test_a_text_is_read_of_dora_by_the_files_of_peft(tmp_path: Path, model_folder: Path) -> None:
    """In a file of PEFT's, the name of a magnitude ends without ``weight``. PEFT runs the adapters on the identity, too."""
    victim = load(saved_adapter(model_folder, tmp_path / "adapter", use_dora=True), "classification")
    batch = victim.tokenizer(["carol paid"], return_tensors="pt")
    victim.model(**batch, labels=torch.tensor([1])).loss.backward()
    state = peft_state(victim, {n: p.grad for n, p in victim.model.named_parameters() if p.grad is not None})
    assert any(n.endswith("query.lora_magnitude_vector") for n in state)
    save_file(state, tmp_path / "update.safetensors")
    found = read_update(tmp_path / "update.safetensors", victim, ReadRequest(attack="span", batch_size=1))
    assert found.texts == ("carol paid",) and found.confidence == "verified"


def test_of_several_adapters_a_file_must_name_its_own(tmp_path: Path, adapter_folder: Path) -> None:
    both = load(adapter_folder, "classification")
    both.model.add_adapter("other", peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4))
    for active in ("default", "other"):
        both.model.set_adapter(active)
        update = sent(both)
        assert any(f".{active}." in n for n in update)
        save_file(update, tmp_path / f"{active}.safetensors")
        check(tmp_path / f"{active}.safetensors", both, update)
    save_file(peft_state(both, update), tmp_path / "unnamed.safetensors")
    with pytest.raises(InputError, match=r"fits several adapters of the model .*default.*other.*; pass a model"):
        open_update(tmp_path / "unnamed.safetensors", both)


def test_lists_of_flower_have_no_names(tmp_path: Path, adapted: Victim) -> None:
    app = pytest.importorskip("flwr.app")
    update = sent(adapted)
    record = app.ArrayRecord([t.numpy() for t in peft_state(adapted, update).values()])
    np.savez(tmp_path / "a.npz", *record.to_numpy_ndarrays())
    notes = check(tmp_path / "a.npz", adapted, update)
    assert "order of the list: the adapter's weights, as PEFT lists them" in notes
    (tmp_path / "b.npy").write_bytes(b"".join(array.data for array in record.values()))  # as they are sent
    check(tmp_path / "b.npy", adapted, update)
    for number, array in enumerate(record.to_numpy_ndarrays()):
        (tmp_path / "c").mkdir(exist_ok=True)
        np.save(tmp_path / "c" / f"{number}.npy", array)
    check(tmp_path / "c", adapted, update)


def test_array_records_of_flower_have_names(tmp_path: Path, adapted: Victim) -> None:
    app = pytest.importorskip("flwr.app")
    update = sent(adapted)
    record = app.ArrayRecord(peft_state(adapted, update))
    torch.save(record.to_torch_state_dict(), tmp_path / "a.pt")
    check(tmp_path / "a.pt", adapted, update)
    np.savez(tmp_path / "a.npz", **{n: a.numpy() for n, a in record.items()})
    check(tmp_path / "a.npz", adapted, update)


def test_lists_of_fl4health_and_fate_follow_the_model(tmp_path: Path, plain: Victim, adapted: Victim) -> None:
    update = sent(plain)
    # FL4Health sends the values of the state dict, FATE the trainable parameters; here both orders are the same.
    state = {**plain.model.state_dict(), **update}
    np.savez(tmp_path / "a.npz", *[t.numpy() for t in state.values()])
    check(tmp_path / "a.npz", plain, update)
    torch.save([t.numpy() for t in update.values()], tmp_path / "arrays.pt")
    with pytest.raises(InputError, match="a part of the list is not a tensor"):
        load_update(tmp_path / "arrays.pt", plain)
    torch.save(list(update.values()), tmp_path / "b.pt")
    check(tmp_path / "b.pt", plain, update)
    tuned = sent(adapted)
    torch.save(list(tuned.values()), tmp_path / "c.pt")
    check(tmp_path / "c.pt", adapted, tuned)


@pytest.mark.parametrize("name", ["gradients", "grads", "gradient", "grad", "update", "delta"])
def test_gradients_beside_the_loss_and_the_weights_are_read(tmp_path: Path, plain: Victim, name: str) -> None:
    update = sent(plain)
    torch.save({"step": 3, "loss": 0.7, name: update}, tmp_path / "a.pt")
    check(tmp_path / "a.pt", plain, update)
    torch.save({"model": plain.model.state_dict(), name: update}, tmp_path / "b.pt")
    check(tmp_path / "b.pt", plain, update)


def test_buffers_in_a_list_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    victim: Any = type("Victim", (), {"model": model})
    update = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    np.savez(tmp_path / "a.npz", *[t.numpy() for t in {**model.state_dict(), **update}.values()])
    check(tmp_path / "a.npz", victim, update)
    torch.save({**model.state_dict(), **update}, tmp_path / "a.pt")
    assert "3 buffers were left out" in check(tmp_path / "a.pt", victim, update)


def test_an_order_that_several_lists_fit_is_asked_for(tmp_path: Path) -> None:
    class Turned(nn.Module):
        """A state dict in another order than the parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def state_dict(self, *given: Any, **more: Any) -> Any:
            return dict(reversed(list(super().state_dict(*given, **more).items())))

    victim: Any = type("Victim", (), {"model": Turned()})
    update = {n: torch.randn(2, 2) for n in ("b.weight", "a.weight")}
    np.savez(tmp_path / "u.npz", *[t.numpy() for t in update.values()])
    with pytest.raises(InputError, match=r"fits several orders .* as --names-from"):
        load_update(tmp_path / "u.npz", victim)
    torch.save(update, tmp_path / "names.pt")
    check(tmp_path / "u.npz", victim, update, names_from=tmp_path / "names.pt")
    np.savez(tmp_path / "u.npz", np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(InputError, match="a list of 2 arrays without names, and their shapes fit no known order"):
        load_update(tmp_path / "u.npz", victim)
    with pytest.raises(InputError, match="has no names either"):
        open_update(tmp_path / "u.npz", victim, names_from=tmp_path / "u.npz")


def test_names_from_an_adapter(tmp_path: Path, adapted: Victim, adapter_folder: Path) -> None:
    update = sent(adapted)
    np.savez(tmp_path / "u.npz", *[t.numpy() for t in peft_state(adapted, update).values()])
    assert "order of the list: --names-from" in check(tmp_path / "u.npz", adapted, update, names_from=adapter_folder)


def test_tied_weights_may_stand_in_a_file_twice(tmp_path: Path) -> None:
    victim: Any = type("Victim", (), {"model": tiny("llama", "causal", tied=True)})
    update = sent(victim)
    torch.save({**update, "lm_head.weight": update["model.embed_tokens.weight"]}, tmp_path / "a.pt")
    told = "copies of tied parameters left out: 1"
    assert told in check(tmp_path / "a.pt", victim, update)
    torch.save({**update, "lm_head.weight": update["model.embed_tokens.weight"] + 1}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="belong to the same parameter"):
        load_update(tmp_path / "a.pt", victim)
    listed = [update.get(n, update["model.embed_tokens.weight"]).numpy() for n in victim.model.state_dict()]
    np.savez(tmp_path / "a.npz", *listed)
    assert told in check(tmp_path / "a.npz", victim, update)
    np.savez(tmp_path / "a.npz", *listed[:-1], listed[-1] + 1)
    with pytest.raises(InputError, match=f"array {len(listed) - 1} and another tensor belong to the same parameter"):
        load_update(tmp_path / "a.npz", victim)


def nested(entries: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{n}": t for n, t in entries.items()}


WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {}


def writer(write: Callable[[Path, dict[str, Tensor]], Path]) -> Callable[[Path, dict[str, Tensor]], Path]:
    WRITERS[write.__name__] = write
    return write


@writer
def nvflare_global_model(place: Path, update: dict[str, Tensor]) -> Path:
    """``FL_global_model.pt`` of NVFlare's persistor, whose model wraps the one that is trained."""
    told = {"model": nested(update, "model."), "meta_props": {"round": 3}, "train_conf": {"train": {"model": "Wrapped"}}}
    torch.save(told, place / "FL_global_model.pt")
    return place / "FL_global_model.pt"


@writer
def nvflare_message(place: Path, update: dict[str, Tensor]) -> Path:
    """The ``data`` and ``meta`` of a message (DXO), saved where it arrives."""
    torch.save({"kind": "WEIGHT_DIFF", "data": nested(update, "model."), "meta": {"steps": 4}}, place / "dxo.pt")
    return place / "dxo.pt"


@writer
def federatedscope_checkpoint(place: Path, update: dict[str, Tensor]) -> Path:
    torch.save({"cur_round": 2, "model": nested(update, "model.")}, place / "final.ckpt")
    return place / "final.ckpt"


@writer
def data_parallel(place: Path, update: dict[str, Tensor]) -> Path:
    torch.save(nested(update, "module."), place / "model.pth")
    return place / "model.pth"


@writer
def compiled_and_sharded(place: Path, update: dict[str, Tensor]) -> Path:
    renamed = {
        n.replace(".encoder.", ".encoder._orig_mod.", 1): t for n, t in nested(update, "_fsdp_wrapped_module.").items()
    }
    torch.save(renamed, place / "model.bin")
    return place / "model.bin"


@writer
def without_the_model_s_own_prefix(place: Path, update: dict[str, Tensor]) -> Path:
    kept = {n.removeprefix("bert."): t for n, t in update.items() if n.startswith("bert.")}
    update.clear()
    update.update(nested(kept, "bert."))
    save_file(kept, place / "body.safetensors")
    return place / "body.safetensors"


@writer
def shards_of_safetensors(place: Path, update: dict[str, Tensor]) -> Path:
    names = sorted(update)
    files = {n: f"model-{k % 2 + 1:05d}-of-00002.safetensors" for k, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: update[n] for n in names if files[n] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return place


@writer
def shards_of_torch(place: Path, update: dict[str, Tensor]) -> Path:
    names = sorted(update)
    files = {n: f"pytorch_model-{k % 2 + 1:05d}-of-00002.bin" for k, n in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: update[n] for n in names if files[n] == file}, place / file)
    (place / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return place / "pytorch_model.bin.index.json"


@writer
def distributed_checkpoint(place: Path, update: dict[str, Tensor]) -> Path:
    """As Accelerate writes it for FSDP: a folder in the folder, ``model.`` before the names, other values beside them."""
    save_checkpoint({"model": update, "step": 3}, checkpoint_id=place / "pytorch_model_fsdp_0")
    save_checkpoint({"optimizer": {"x": torch.zeros(3)}}, checkpoint_id=place / "optimizer_0")
    return place


@writer
def parameters_and_views(place: Path, update: dict[str, Tensor]) -> Path:
    """Parameters, transposed tensors and parts of larger storages, as state dicts hold them."""
    torch.save({n: nn.Parameter(t.T.contiguous().T if t.ndim == 2 else t[:]) for n, t in update.items()}, place / "v.pt")
    return place / "v.pt"


@writer
def compressed_arrays(place: Path, update: dict[str, Tensor]) -> Path:
    arrays: dict[str, Any] = {n: np.asfortranarray(t.numpy()) for n, t in update.items()}
    np.savez_compressed(place / "a.npz", **arrays)
    return place / "a.npz"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_was_written_is_read(name: str, tmp_path: Path, plain: Victim) -> None:
    update = sent(plain)
    notes = check(WRITERS[name](tmp_path, update), plain, update)
    assert notes and all(note.isprintable() for note in notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_every_precision_is_read_from_every_family(tmp_path: Path, plain: Victim, dtype: torch.dtype) -> None:
    update = {n: t.to(dtype) for n, t in sent(plain).items()}
    torch.save(update, tmp_path / "a.pt")
    check(tmp_path / "a.pt", plain, update)
    save_checkpoint(update, checkpoint_id=tmp_path / "dcp")
    check(tmp_path / "dcp", plain, update)
    if dtype in (torch.float16, torch.float64):
        arrays: dict[str, Any] = {n: t.numpy() for n, t in update.items()}
        np.savez(tmp_path / "a.npz", **arrays)
        check(tmp_path / "a.npz", plain, update)


def test_torch_files_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    views = {
        "a": base[1:, 2:].T.expand(4, 3, 5)[0],
        "b": base.flatten()[7:9],
        "c": torch.zeros(0, 3),
        "d": torch.tensor(2.0),
    }
    torch.save(views, tmp_path / "a.pt")
    theirs = torch.load(tmp_path / "a.pt", weights_only=True)
    ours = {e.name: e.read() for e in opened(tmp_path / "a.pt").entries}
    assert list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def blockwise(tensor: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Places in ``table`` of the entries over the largest in their block, and these: the published layout, done slowly."""
    flat = tensor.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % block)]).reshape(-1, block)
    sizes = padded.abs().amax(1)
    places = (padded / sizes[:, None]).flatten()[: len(flat), None].sub(table).abs().argmin(1)
    return places.to(torch.uint8), sizes


NF4 = torch.tensor(
    [
        -1.0,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.0911,
        0.0,
        0.0796,
        0.1609,
        0.2461,
        0.3379,
        0.4407,
        0.5626,
        0.723,
        1.0,
    ]
)


def quantised(update: Mapping[str, Tensor], kind: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors and ``quant_state`` of NVFlare's ``ModelQuantizer``, by bitsandbytes' published layout."""
    data: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, tensor in update.items():
        if kind == "blockwise8":
            table = torch.linspace(-1, 1, 256)
            places, sizes = blockwise(tensor, table, 4096)
            data[name], states[name] = places.reshape(tensor.shape), {"absmax": sizes, "code": table}
            continue
        places, sizes = blockwise(tensor, NF4, 64)
        pairs = torch.cat([places, places.new_zeros(len(places) % 2)]).reshape(-1, 2)
        data[name] = (pairs[:, :1] << 4) | pairs[:, 1:]
        states[name] = {
            "quant_type": kind, "absmax": sizes, "blocksize": 64, "quant_map": NF4, "dtype": "float32",
            "shape": tuple(tensor.shape),
        }  # fmt: skip
    return data, states


@pytest.mark.parametrize(("kind", "near"), [("blockwise8", 0.005), ("nf4", 0.16), ("fp4", 0.16)])
def test_quantised_tensors_are_undone(tmp_path: Path, plain: Victim, kind: str, near: float) -> None:
    update = sent(plain)
    data, states = quantised(update, kind)
    torch.save({"data": nested(data, "model."), "meta": {"quant_state": nested(states, "model.")}}, tmp_path / "a.pt")  # type: ignore[arg-type]
    check(tmp_path / "a.pt", plain, update, near=near)
    torch.save({**data, "quant_state": states}, tmp_path / "b.pt")
    check(tmp_path / "b.pt", plain, update, near=near)


def test_a_state_of_quantisation_that_does_not_fit_is_refused(tmp_path: Path, plain: Victim) -> None:
    data, states = quantised(dict(list(sent(plain).items())[:1]), "nf4")
    (name,) = data
    for change, says in (
        ({"shape": (10**6, 10**6)}, "as many"), ({"blocksize": 0}, "expected 1 to"), ({"absmax": NF4}, "does not fit"),
        ({"quant_map": NF4[:3]}, "in blocks of"), ({"quant_type": "int3"}, "expected bytes of"),
        ({"nested_absmax": NF4}, "is quantised twice"), ({"absmax": 3}, "lacks absmax"), ({"shape": None}, "its shape"),
    ):  # fmt: skip
        torch.save({**data, "quant_state": {name: {**states[name], **change}}}, tmp_path / "a.pt")
        with pytest.raises(InputError, match=says):
            load_update(tmp_path / "a.pt", plain)
    torch.save({**data, "quant_state": {"other": states[name]}}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="has a quantisation state but no tensor"):
        load_update(tmp_path / "a.pt", plain)


@pytest.mark.parametrize("kind", ["blockwise8", "nf4", "fp4"])
def test_what_bitsandbytes_quantised_is_what_it_dequantises(tmp_path: Path, plain: Victim, kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, states, exact = {}, {}, {}
    flat: dict[str, Tensor] = {}
    for name, tensor in sent(plain).items():
        if kind == "blockwise8":
            data[name], state = functional.quantize_blockwise(tensor)
            states[name] = {"absmax": state.absmax, "code": state.code}
            exact[name] = functional.dequantize_blockwise(data[name], absmax=state.absmax, code=state.code)
            flat |= {name: data[name], f"{name}.absmax": state.absmax, f"{name}.code": state.code}
        else:
            data[name], state = functional.quantize_4bit(tensor, quant_type=kind)
            states[name] = state.as_dict()
            exact[name] = functional.dequantize_4bit(data[name], state).reshape(tensor.shape)
            flat |= {name: data[name], **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}
    torch.save({"data": data, "meta": {"quant_state": states}}, tmp_path / "a.pt")
    check(tmp_path / "a.pt", plain, exact, near=1e-6)
    save_file({n: t.clone() for n, t in flat.items()}, tmp_path / "a.safetensors")
    check(tmp_path / "a.safetensors", plain, exact, near=1e-6)


@pytest.mark.parametrize(("kind", "near"), [("float16", 1e-3), ("blockwise8", 0.02), ("float4", 0.2), ("normfloat4", 0.2)])
def test_what_nvflare_quantised_is_read(
    tmp_path: Path, plain: Victim, monkeypatch: pytest.MonkeyPatch, kind: str, near: float
) -> None:
    pytest.importorskip("bitsandbytes")
    quantizer = pytest.importorskip("nvflare.app_opt.pt.quantization.quantizer")
    context = pytest.importorskip("nvflare.apis.fl_context").FLContext()
    monkeypatch.setattr(
        torch.Tensor, "cuda", lambda tensor: tensor
    )  # NVFlare asks for a GPU; bitsandbytes does not need one
    update = sent(plain)
    data, states, _ = quantizer.ModelQuantizer(kind).quantization(nested(update, "model."), context)
    torch.save({"kind": "WEIGHT_DIFF", "data": data, "meta": {"quant_state": states}}, tmp_path / "dxo.pt")
    check(tmp_path / "dxo.pt", plain, update, near=near)


def test_the_model_that_nvflare_keeps_is_read(tmp_path: Path, plain: Victim) -> None:
    formats = pytest.importorskip("nvflare.app_opt.pt.model_persistence_format_manager")
    update = sent(plain)
    manager = formats.PTModelPersistenceFormatManager(nested(update, "model."), default_train_conf={"train": {"model": "X"}})
    torch.save(manager.to_persistence_dict(), tmp_path / "FL_global_model.pt")
    check(tmp_path / "FL_global_model.pt", plain, update)


def test_weights_after_minus_weights_before(tmp_path: Path, adapted: Victim, adapter_folder: Path) -> None:
    before = load_file(adapter_folder / "adapter_model.safetensors")
    after = {n: t + 0.01 * torch.randn_like(t) for n, t in before.items()}
    save_file(after, tmp_path / "after.safetensors")
    with pytest.raises(InputError, match=r"holds weights, not an update.*--before"):
        load_update(tmp_path / "after.safetensors", adapted)
    found = open_update(tmp_path / "after.safetensors", adapted, before=adapter_folder)
    named = peft_names(found.entries)
    assert all(torch.equal(named[n], (after[n].double() - before[n].double()).float()) for n in after)
    assert any(note.startswith("before: ") for note in found.notes)
    with pytest.raises(InputError, match="the weights before and after the round are the same"):
        open_update(adapter_folder, adapted, before=adapter_folder)
    short = dict(list(before.items())[1:])
    save_file(short, tmp_path / "short.safetensors")
    with pytest.raises(InputError, match="lack 1 of the tensors after"):
        open_update(tmp_path / "after.safetensors", adapted, before=tmp_path / "short.safetensors")


@pytest.mark.parametrize("name", ["round-3/model", "peft_3", "round-3-weights.npz", "model_round_3.pth"])
def test_the_weights_of_a_round_are_found_by_name(tmp_path: Path, name: str) -> None:
    for number in (3, 30, 13):
        place = tmp_path / name.replace("3", str(number), 1)
        place.mkdir(parents=True) if "." not in name else place.write_bytes(b"")
    (tmp_path / "sent").mkdir()
    update = tmp_path / "sent" / "client-1.safetensors"
    update.write_bytes(b"")
    assert of_round(update, 3) == (tmp_path / name).resolve()
    with pytest.raises(InputError, match="round 4: no file or folder near"):
        of_round(update, 4)
    (tmp_path / "round_3").mkdir()
    with pytest.raises(InputError, match="holds 2 candidates"):
        of_round(update, 3)


def test_a_difference_needs_a_kind_of_training() -> None:
    with pytest.raises(InputError, match="a difference of weights is not a gradient"):
        ReadRequest(before="x")
    with pytest.raises(InputError, match="pass one of them"):
        ReadRequest(before="x", before_round=1, update="fedavg-sgd:1:0.1")


def test_a_round_of_flower_is_read_without_conversion(tmp_path: Path, model_folder: Path, adapter_folder: Path) -> None:
    """The base model, the server's adapter of the round before, and the list of weights that a client sent."""
    text = "alpha met bravo in delta"
    assert adapter_among(model_folder, adapter_folder) == adapter_folder and adapter_among(adapter_folder, "x") is None
    client = load(adapter_folder, "classification")
    batch = dict(client.tokenizer([text], return_tensors="pt"), labels=torch.tensor([1]))
    own = [p for p in client.model.parameters() if p.requires_grad]
    # The gradients of a random model are tiny: this rate lifts the change above the rounding of float32.
    optimizer = torch.optim.SGD(own, lr=1000.0)
    client.model(**batch).loss.backward()
    optimizer.step()
    state = peft.get_peft_model_state_dict(client.model)
    np.savez(tmp_path / "client.npz", *[t.detach().numpy() for t in state.values()])
    # The server's folder may name a base model that is somewhere else.
    victim = load(model_folder, "classification", adapter=adapter_folder)
    request = ReadRequest(batch_size=1, update="fedavg-sgd:1:1000", before=adapter_folder)
    weights = {n: p.detach().clone() for n, p in victim.model.named_parameters()}
    found = read_update(tmp_path / "client.npz", victim, request)
    assert found.texts == (text,) and found.confidence in ("verified", "span") and found.file
    assert all(torch.equal(p, weights[n]) for n, p in victim.model.named_parameters())


def test_the_model_holds_the_weights_before_while_it_is_read(tmp_path: Path, plain: Victim) -> None:
    name = "classifier.bias"
    own = plain.model.get_parameter(name)
    kept = own.detach().clone()
    with holding(plain.model, {name: kept + 1}):
        assert torch.equal(own, kept + 1)
    assert torch.equal(own, kept)


def damaged_checkpoints(place: Path) -> None:
    part = next(place.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damaged_checkpoints, "is too short"),
        (lambda place: next(place.glob("*.distcp")).unlink(), "needs the files of every process"),
        (lambda place: (place / ".metadata").write_bytes(b"\x80\x04]."), "does not describe a distributed checkpoint"),
        (lambda place: (place / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR."), "instruction STRING"),
        (lambda place: (place / ".metadata").write_bytes(b"\x80\x04"), "damaged"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_damaged_checkpoints_are_refused(tmp_path: Path, plain: Victim, spoil: Callable[[Path], None], says: str) -> None:
    save_checkpoint({"classifier.bias": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    spoil(tmp_path / "c")
    with pytest.raises(InputError, match=says):
        load_update(tmp_path / "c", plain)


def test_what_does_not_belong_is_refused(tmp_path: Path, plain: Victim, adapted: Victim) -> None:
    bias = torch.ones(2)
    save_file(peft_state(adapted, sent(adapted)), tmp_path / "lora.safetensors")
    with pytest.raises(InputError, match=r"holds LoRA weights .* but the model has no adapter"):
        load_update(tmp_path / "lora.safetensors", plain)
    torch.save({"classifier.bias": bias, "module.classifier.bias": bias}, tmp_path / "twice.pt")
    with pytest.raises(InputError, match=r"belong to the same parameter classifier\.bias"):
        load_update(tmp_path / "twice.pt", plain)
    tied: Any = type("Victim", (), {"model": tiny("llama", "causal", tied=True)})
    huge = torch.ones(1).expand(10**6, 10**6)
    torch.save({"lm_head.weight": huge, "model.embed_tokens.weight": huge}, tmp_path / "huge.pt")
    with pytest.raises(InputError, match=r"belong to the same parameter model\.embed_tokens"):
        load_update(tmp_path / "huge.pt", tied)
    torch.save({"bias": torch.ones(64)}, tmp_path / "short.pt")
    with pytest.raises(InputError, match=r"matches .* parameters of the model"):
        load_update(tmp_path / "short.pt", plain)
    torch.save({"classifier.bias": "two\nlines", "x\ny": bias}, tmp_path / "lines.pt")
    with pytest.raises(InputError) as caught:
        load_update(tmp_path / "lines.pt", plain)
    assert "\n" not in str(caught.value)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000,), }".ljust(117) + b"\n"
        archive.writestr("classifier.bias.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(10**7))
    with pytest.raises(InputError, match="has shape"):
        load_update(tmp_path / "bomb.npz", plain)
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../lora.safetensors"}}))
    with pytest.raises(InputError, match="expected a file in the same folder"):
        load_update(tmp_path / "i", plain)


SHARDED = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{sys.argv[1]}/saved")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_two_processes_of_fsdp_saved_is_what_torch_merges(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", SHARDED, str(tmp_path), str(rank)] for rank in range(2)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "merged.pt")
    theirs = torch.load(tmp_path / "merged.pt", weights_only=True)["model"]
    victim: Any = type("Victim", (), {"model": nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))})
    check(tmp_path / "saved", victim, theirs)


def test_weights_of_an_adapter_whose_b_outgrew_the_rest_are_no_update() -> None:
    """«Nothing was recovered: rounding or noise hides it», it said of the weights of a trained adapter."""
    torch.manual_seed(0)
    a, b = torch.nn.Linear(32, 8, bias=False), torch.nn.Linear(8, 32, bias=False)
    torch.nn.init.zeros_(b.weight)  # LoRA's B
    model, first = torch.nn.Sequential(a, b), a.weight.detach().clone()
    moved, grown = first + 0.6 * first.std() * torch.randn_like(first), 5 * torch.randn(32, 8)
    with pytest.raises(InputError, match="holds weights, not an update"):
        check_update({"0.weight": moved, "1.weight": grown}, model, "adapter")
    for update in (0.6 * first.std() * torch.randn_like(first), torch.zeros_like(first), -0.01 * first, 0.01 * first):
        check_update({"0.weight": update, "1.weight": grown}, model, "adapter")


def test_a_state_dict_with_the_layers_that_copies_replace_is_read(tmp_path: Path, adapter_folder: Path) -> None:
    """``model.state_dict()`` of PEFT holds the layer of which ``modules_to_save`` trains a copy, too."""
    victim = load(adapter_folder, "classification")
    state = victim.model.state_dict()
    assert any("original_module" in n for n in state) and any("modules_to_save" in n for n in state)
    torch.manual_seed(0)
    own = {n: p for n, p in victim.model.named_parameters() if "lora_" in n or "modules_to_save" in n}
    sent = {n: 0.01 * torch.randn_like(p) for n, p in own.items()}
    save_file({n: t.detach().clone().contiguous() for n, t in state.items()}, tmp_path / "before.safetensors")
    after = {n: (t.detach() + sent[n] if n in sent else t.detach()).clone().contiguous() for n, t in state.items()}
    save_file(after, tmp_path / "after.safetensors")
    update = open_update(tmp_path / "after.safetensors", victim, before=tmp_path / "before.safetensors")
    assert any("weights that an adapter trains a copy of were left out: 2" in note for note in update.notes), update.notes
    changed = {n: t for n, t in update.entries.items() if bool(t.any())}
    assert changed.keys() == sent.keys()
    assert all(torch.allclose(changed[n], sent[n], atol=1e-6) for n in sent)


def test_frozen_weights_that_did_not_change_count_as_not_sent(tmp_path: Path, adapted: Victim) -> None:
    """A whole state dict had zeros for the frozen weights, which read as gradients: the last word of every text was lost."""
    update = {n: t for n, t in sent(adapted).items() if "lora_" in n}
    first = next(iter(update))
    update[first] = torch.zeros_like(update[first])  # as of A in the first step
    others = ((n, p) for n, p in adapted.model.named_parameters() if n not in update and ".original_module." not in n)
    frozen = {n: torch.zeros_like(p) for n, p in others}
    save_file({**update, **frozen}, tmp_path / "whole.safetensors")
    found = load_update(tmp_path / "whole.safetensors", adapted)
    assert found.keys() == update.keys() and all(torch.equal(found[n], t.float()) for n, t in update.items())
    notes = open_update(tmp_path / "whole.safetensors", adapted).notes
    assert f"{len(frozen)} of {len(frozen) + len(update)} tensors did not change and count as not trained" in notes
    save_file({n: torch.zeros_like(t) for n, t in update.items()}, tmp_path / "zero.safetensors")
    assert load_update(tmp_path / "zero.safetensors", adapted).keys() == update.keys(), "refused where it is read"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_rounding_between_before_and_after_is_no_update(tmp_path: Path, plain: Victim, kind: torch.dtype) -> None:
    """A client trained in 16 bits, the weights before were the folder of 32: the rounding was read as text."""
    own = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
    short = {n: t.to(kind) for n, t in own.items()}
    step = {n: (t.float() + 0.05 * torch.randn_like(t.float())).to(kind) for n, t in short.items()}
    for name, held in (("before", own), ("short", short), ("after", step)):
        save_file(held, tmp_path / f"{name}.safetensors")
    for first, last in (("before", "short"), ("short", "before")):
        with pytest.raises(InputError, match="the weights before and after the round are the same"):
            open_update(tmp_path / f"{last}.safetensors", plain, before=tmp_path / f"{first}.safetensors")
    wanted = {n: t.float() - short[n].float() for n, t in step.items()}
    wide = check(tmp_path / "after.safetensors", plain, wanted, before=tmp_path / "before.safetensors")
    assert f"were rounded to {str(kind).removeprefix('torch.')}" in " ".join(wide)
    alike = check(tmp_path / "after.safetensors", plain, wanted, before=tmp_path / "short.safetensors")
    assert "round" not in " ".join(alike)
    save_file({n: t.float() for n, t in step.items()}, tmp_path / "wide.safetensors")
    finer = check(tmp_path / "wide.safetensors", plain, wanted, before=tmp_path / "short.safetensors")
    assert "those after in finer numbers" in " ".join(finer), "exact, if the client began with them"
