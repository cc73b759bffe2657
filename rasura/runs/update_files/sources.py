"""Recognises files and folders by their first bytes and chooses the reader. Pickles are never executed."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from rasura.core.interfaces import InputError
from rasura.runs.update_files.checkpoints import METADATA
from rasura.runs.update_files.checkpoints import opened as checkpoint
from rasura.runs.update_files.entries import Entry, Source, check_names, refusing
from rasura.runs.update_files.numpy_files import archived, buffers, folder
from rasura.runs.update_files.quantised import restored
from rasura.runs.update_files.safetensors_files import opened as safetensors_file
from rasura.runs.update_files.torch_files import opened as torch_file

INDEX = re.compile(r".*\.(safetensors|bin)\.index\.json")
MAX_INDEX = 50_000_000
"""Maximum bytes of an index of shards."""

WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "adapter_model.bin", "pytorch_model.bin")
"""The names of weight files in a folder, in the order in which they are searched for."""

PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
REFUSED = (
    "which can run code and is never opened. If you trust the sender, load it yourself and write "
    "safetensors.torch.save_file({name: tensor}, 'update.safetensors')"
)


def opened(path: str | Path) -> Source:
    """The dequantised tensors of a file or folder of any framework. Raises ``InputError``, in one line, for a file that is
    missing or damaged, or that could run code.
    """
    place = Path(path)
    with refusing(place):
        if place.is_dir():
            return restored(_folder(place))
        if not place.is_file():
            raise InputError(f"{place} does not exist; expected an update file or the folder of a checkpoint")
        return restored(_file(place))


def _folder(place: Path) -> Source:
    if (place / METADATA).is_file():
        return checkpoint(place)
    indexes = sorted(p for p in place.iterdir() if INDEX.fullmatch(p.name))
    if indexes:
        return _shards(indexes[0])
    for name in WEIGHTS:
        if (place / name).is_file():
            return _file(place / name)
    inner = sorted(p.parent for p in place.glob(f"*/{METADATA}"))
    models = [p for p in inner if not p.name.startswith("optim")]
    if len(models) == 1:
        return checkpoint(models[0])
    arrays = sorted(place.glob("*.npy"))
    if arrays:
        return folder(place, arrays)
    expected = ", ".join(WEIGHTS[:2])
    raise InputError(f"{place} is a folder without weights; expected {expected}, a distributed checkpoint or .npy files")


def _file(file: Path) -> Source:
    with file.open("rb") as readable:
        head = readable.read(512)
    if head.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(file) as archive:
            arrays = any(name.endswith(".npy") for name in archive.namelist())
        return archived(file) if arrays else torch_file(file)
    if head.startswith(b"\x93NUMPY"):
        return buffers(file)
    if INDEX.fullmatch(file.name):
        return _shards(file)
    # The length of a safetensors header may begin as a pickle does; its header begins with a brace.
    if head.startswith(PROTOCOLS) and head[8:9] != b"{":
        raise InputError(f"{file} is a pickle (or a file of torch.save before 1.6), {REFUSED}")
    if _base64_pickle(head):
        raise InputError(f"{file} is a pickle in base64, as sent by FederatedScope, {REFUSED}")
    return safetensors_file(file)


def _base64_pickle(head: bytes) -> bool:
    start = head.strip().lstrip(b"\"'")[:64]
    if not re.fullmatch(rb"[A-Za-z0-9+/\n=]{8,}", start):
        return False
    try:
        return base64.b64decode(start[:8]).startswith(PROTOCOLS)
    except binascii.Error:
        return False


def _shards(index: Path) -> Source:
    """The tensors of several files, as an index beside them lists."""
    if index.stat().st_size > MAX_INDEX:
        raise InputError(f"{index} has {index.stat().st_size} bytes; expected at most {MAX_INDEX}")
    told = json.loads(index.read_text(encoding="utf-8"))
    places = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
        raise InputError(f"{index} has no weight_map of names and files")
    reader: Callable[[Path], Source] = torch_file if ".bin." in index.name else safetensors_file
    entries: dict[str, Entry] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise InputError(f"{index} names {name[:100]!r}; expected a file in the same folder")
        if not (index.parent / name).is_file():
            raise InputError(f"{index} names {name[:100]}, which does not exist")
        entries |= {str(e.name): e for e in reader(index.parent / name).entries if places.get(str(e.name)) == name}
    lacking = [name for name in places if name not in entries]
    if lacking:
        raise InputError(f"{index} lists {lacking[0][:100]}, which its file does not hold")
    found = [entries[name] for name in places]
    check_names(found, index)
    return Source(index, f"shards of {'torch.save' if '.bin.' in index.name else 'safetensors'}", found, ordered=False)
