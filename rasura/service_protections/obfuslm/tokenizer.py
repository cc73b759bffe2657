"""The client's tokenizer: that of the model, with its vocabulary shuffled by the key (ObfusLM, sec. 4.3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from rasura.core.interfaces import InputError
from rasura.service_protections.obfuslm.key import PAIR, Key

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OPTIONS = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template")


class ObfuscatedTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is read as untyped
    """Encodes text to the ids of an obfuscated model, and decodes its answers: ``ObfuscatedTokenizer("my.key")``.

    It is a Hugging Face fast tokenizer and works wherever one does: ``generate``, ``Trainer``, chat templates. Pass the
    served ``model`` too (a folder, a model, or the id that its ``config.json`` states) to check that the key belongs to it.
    Raises ``InputError`` for a key that cannot be read and for ids outside the vocabulary.
    """

    def __init__(
        self, key: str | Path | Key, passphrase: str | None = None, *, model: str | Path | nn.Module | None = None
    ) -> None:
        known = key if isinstance(key, Key) else Key.load(key, passphrase)
        if model is not None:
            check_pair(known, model)
        self._rows = len(known.tokens)
        super().__init__(tokenizer_object=Tokenizer.from_str(shuffled(known)), **known.options)

    def _decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        wrong = next((int(i) for i in ids if not 0 <= int(i) < self._rows), None)
        if wrong is not None:
            raise InputError(f"id {wrong} is outside the vocabulary of {self._rows}; replace -100 if it is among them")
        return str(super()._decode(token_ids, *args, **kwargs))

    def save_pretrained(self, *_: Any, **__: Any) -> tuple[str, ...]:
        """Writes nothing: the shuffled vocabulary is the key, and a folder of weights may go to the server."""
        return ()

    def push_to_hub(self, *_: Any, **__: Any) -> str:
        """Raises ``InputError``: the shuffled vocabulary is the key."""
        raise InputError("this tokenizer holds a key and must not be published")


def describe(tokenizer: Any) -> tuple[str, dict[str, Any]]:
    """A fast tokenizer as JSON, and its options. Raises ``InputError`` for one that is not fast."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{type(tokenizer).__name__} is not a fast tokenizer; expected a folder with tokenizer.json")
    options = {name: getattr(tokenizer, name, None) for name in OPTIONS}
    options |= {name: str(t) for name in SPECIAL if (t := getattr(tokenizer, name, None)) is not None}
    return str(backend.to_str()), {name: value for name, value in options.items() if value is not None}


def fixed_ids(tokenizer: Any, rows: int) -> frozenset[int]:
    """The ids of a model of ``rows`` rows that keep their place: special tokens, and ids that no text can have."""
    told = json.loads(describe(tokenizer)[0])
    vocabulary = told["model"]["vocab"]
    special = set(tokenizer.all_special_ids) | {t["id"] for t in told["added_tokens"] if t["special"]}
    # A list (unigram) numbers its pieces by their place; what was added behind it cannot be given another id.
    used = set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())
    if isinstance(vocabulary, dict):
        used |= {t["id"] for t in told["added_tokens"]}
    return frozenset(special | (set(range(rows)) - used))


def shuffled(key: Key) -> str:
    """The key's tokenizer as JSON, every token under its obfuscated id."""
    told = json.loads(key.tokenizer)
    tokens = key.tokens.tolist()
    model, added = told["model"], told["added_tokens"]
    if isinstance(model["vocab"], list):
        pieces = list(model["vocab"])
        for old, piece in enumerate(model["vocab"]):
            pieces[tokens[old]] = piece
        model["vocab"] = pieces
        if model.get("unk_id") is not None:
            model["unk_id"] = tokens[model["unk_id"]]
    else:
        # An added token takes the id that the model's vocabulary has for it.
        known: Mapping[str, int] = model["vocab"] | {t["content"]: t["id"] for t in added if not t["special"]}
        model["vocab"] = {token: tokens[i] for token, i in known.items()}
    for token in added:
        token["id"] = tokens[token["id"]]
    told["added_tokens"] = sorted(added, key=lambda t: int(t["id"]))
    return json.dumps(told)


def check_pair(key: Key, model: str | Path | nn.Module) -> None:
    """Raises ``InputError`` where ``model`` (a folder, a model, or its stated id) was not made with ``key``."""
    if isinstance(model, nn.Module):
        found = getattr(getattr(model, "config", None), PAIR, None)
    elif (Path(model) / "config.json").is_file():
        found = json.loads((Path(model) / "config.json").read_text(encoding="utf-8")).get(PAIR)
    else:
        found = str(model)
    if found != key.pair:
        other = found or "not obfuscated"
        raise InputError(
            f"the key belongs to the obfuscated model {key.pair}, but this one is {other}; pass the key of this model"
        )
