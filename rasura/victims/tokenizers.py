"""The tokenizer of a victim, and what is publicly known of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rasura.core.interfaces import InputError
from rasura.core.vocabulary import Vocabulary, unknown_ids
from rasura.victims.weights import first_line


def vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """The facts of the public tokenizer, for a model whose word embedding has ``size`` rows."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    absent = {i for i, t in enumerate(tokens) if t is None} | set(range(len(tokens), size))
    unused = {i for i, t in enumerate(tokens) if str(t).startswith("[unused")} | absent
    special = frozenset(tokenizer.all_special_ids)
    return Vocabulary(
        size=size,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        prefix=tuple(full[:start]),
        suffix=tuple(full[start + len(bare) :]),
        pad_id=tokenizer.pad_token_id,
        special_ids=special,
        unused_ids=frozenset(unused),
        unknown_ids=unknown_ids(tokenizer) | absent,
        control_ids=frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special) - special,
    )


def has_tokenizer(path: Path) -> bool:
    """Whether the folder ``path`` holds a tokenizer."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
    return any((path / name).is_file() for name in names)


def load_tokenizer(source: str, trust_remote_code: bool, revision: str | None = None) -> Any:
    """The tokenizer of ``source``, a folder, or a hub id in its ``revision``. Raises ``InputError`` where there is none,
    or it is damaged."""
    from transformers import AutoTokenizer

    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        raise InputError(f"{source} holds no tokenizer: expected tokenizer.json or vocab.txt beside the weights")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision or "main")
    except Exception as error:
        raise InputError(f"{source}: the tokenizer cannot be loaded ({first_line(error)})") from None
