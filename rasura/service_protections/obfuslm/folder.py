"""From a public model to a folder for a server and a key for its owner."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness
from rasura.core.values import Task
from rasura.service_protections.obfuslm.key import PAIR, Key
from rasura.service_protections.obfuslm.model import obfuscate
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.obfuslm.tokenizer import describe, fixed_ids
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.weights import task_of


@dataclass(frozen=True)
class Served:
    """What was made: the ``folder`` for the server, the ``key`` file for its owner, the ``pair`` that both state; tokens
    hidden, their clusters, and how many tokens stood in clusters that were too small and were merged."""

    folder: Path
    key: Path
    pair: str
    tokens: int
    clusters: int
    merged: int


def obfuscate_model(
    model: str | Path,
    folder: str | Path,
    key: str | Path,
    settings: ObfuscationSettings,
    *,
    passphrase: str | None = None,
    task: Task | None = None,
    num_labels: int | None = None,
    rng: Randomness | None = None,
) -> Served:
    """Obfuscate a whole model with ObfusLM: ``folder`` for a server, and its ``key``, a file that stays with the owner.

    ``folder`` is an ordinary Hugging Face folder (safetensors, config) without a tokenizer. ``task``: by the model's
    architecture if None; a classifier's head that the model lacks is drawn fresh with ``num_labels`` classes, or two.
    Randomness from the operating system unless ``rng`` is given, which is for experiments. ``obfuscate_embedding`` does
    the same to one table in memory; GHOST, which changes texts and no model, is ``obfuscate_file``. Raises
    ``InputError`` for a folder or key that exists, a key inside the folder or in its place, and all that ``load`` and
    ``obfuscate`` refuse.
    """
    target, secret = Path(folder), Path(key)
    for path in (target, secret):
        if path.exists():
            raise InputError(f"{path} already exists; remove it or choose another name")
    if target.resolve() in (secret.resolve(), *secret.resolve().parents):
        raise InputError(f"the key {secret} would be inside the server's folder {target}; choose another place for it")
    if not secret.resolve().parent.is_dir():
        raise InputError(f"the folder of the key {secret} does not exist; make it first")
    victim = load(model, task or task_of(model), num_labels=num_labels)
    name = parts(victim.model).word_embedding
    digest = _digest(victim.model.get_parameter(name))
    fixed = fixed_ids(victim.tokenizer, victim.vocabulary.size)
    tokenizer, options = describe(victim.tokenizer)
    made = obfuscate(victim.model, settings, fixed, rng, in_place=True)
    pair = secrets.token_hex(8)
    served: Any = made.model
    setattr(served.config, PAIR, pair)
    served.config._name_or_path = ""
    # A folder of a name that nobody knows beforehand: what lies in the server's folder was written here.
    part = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.part")
    try:
        served.save_pretrained(part)
        Key(made.tokens, tokenizer, options, pair, digest, settings.to_dict()).save(secret, passphrase)
        part.rename(target)
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Served(target, secret, pair, made.hidden, made.clusters, made.merged)


def _digest(table: torch.Tensor) -> str:
    data = table.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]
