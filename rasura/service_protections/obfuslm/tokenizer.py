"""The client's tokenizer: that of the model, with its vocabulary shuffled by the key (ObfusLM, sec. 4.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from rasura.core.interfaces import InputError
from rasura.service_protections.obfuslm.key import PAIR, Key

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILLER = ""
"""Stands in a list of pieces where an added token has its id: it matches no text. Its score is that of another piece,
since the lowest score of all decides what an unknown letter costs."""

OPTIONS = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template")


class ObfuscatedTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is read as untyped
    """Encodes text to the ids of an obfuscated model, and decodes its answers: ``ObfuscatedTokenizer("my.key")``.

    It is a Hugging Face fast tokenizer and works wherever one does: ``generate``, ``Trainer``, chat templates. Pass the
    served ``model`` too (a folder, a model, or the id that its ``config.json`` states) to check that the key belongs to it.
    Raises ``InputError`` for a key that cannot be read and for ids outside the vocabulary.
    """

    _fillers = 0

    def __init__(
        self, key: str | Path | Key, passphrase: str | None = None, *, model: str | Path | nn.Module | None = None
    ) -> None:
        known = key if isinstance(key, Key) else Key.load(key, passphrase)
        if model is not None:
            check_pair(known, model)
        self._rows = len(known.tokens)
        self._tokenizer = placed(shuffled(known))
        super().__init__(**known.options)
        self._fillers = super().__len__() - len(self.get_vocab())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens; the vocabulary is the key and is not shown)"

    def __len__(self) -> int:
        return int(super().__len__()) - self._fillers

    def get_vocab(self) -> dict[str, int]:
        """Every token with its obfuscated id."""
        return {token: i for token, i in super().get_vocab().items() if token != FILLER}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": self._tokenizer.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tokenizer=placed(state["_tokenizer"]))

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
    used = set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())
    used |= {t["id"] for t in told["added_tokens"]}
    return frozenset(special | (set(range(rows)) - used))


def shuffled(key: Key) -> str:
    """The key's tokenizer as JSON, every token under its obfuscated id: for ``placed``."""
    told = json.loads(key.tokenizer)
    tokens = key.tokens.tolist()
    model = told["model"]
    if isinstance(model["vocab"], list):
        moved = {tokens[old]: piece for old, piece in enumerate(model["vocab"])}
        model["vocab"] = [moved.get(i, [FILLER, model["vocab"][0][1]]) for i in range(max(moved) + 1)]
        if model.get("unk_id") is not None:
            model["unk_id"] = tokens[model["unk_id"]]
    else:
        model["vocab"] = {token: tokens[i] for token, i in model["vocab"].items()}
    for token in told["added_tokens"]:
        token["id"] = tokens[token["id"]]
    return json.dumps(told)


def placed(text: str) -> Tokenizer:
    """The tokenizer of this JSON, with each added token under the id that is stated there.

    The library numbers added tokens itself, behind the vocabulary of the model, unless the model knows them. A model
    that knows them also finds them inside other words. So it knows them only while the added tokens are read.
    """
    told = json.loads(text)
    model, added = told["model"], {t["content"]: t["id"] for t in told["added_tokens"]}
    known: Any
    if isinstance(model["vocab"], list):
        at = {i: [token, 0.0] for token, i in added.items()}
        pieces = dict(enumerate(model["vocab"])) | at
        known = [pieces.get(i, [FILLER, 0.0]) for i in range(max(pieces) + 1)]
    else:
        known = model["vocab"] | added
    made = Tokenizer.from_str(json.dumps(told | {"model": model | {"vocab": known}}))
    made.model = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model})).model
    return made


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
