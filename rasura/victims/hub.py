"""Model names that are no folder: whether the Hugging Face hub can know them, asked once and without retries."""

from __future__ import annotations

import difflib
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from rasura.core.errors import InputError
from rasura.victims.embedded import NAMES

SECONDS = 10
"""How long the hub may take to answer."""


def check_hub_id(name: str) -> None:
    """Raise ``InputError`` if ``name``, which is not a folder, cannot be loaded from the hub or its cache.

    The message names similar folders and models. A name like one of ours, or like a model folder beside it, is refused
    without asking the hub.
    """
    near = _near(name)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    if Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise InputError(f"model folder {name} does not exist{meant}")
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:
        raise InputError(f"{name} is neither a model folder nor a name that the hub allows{meant}") from None
    if near:
        raise InputError(f"model {name} is not known{meant}")
    try:
        HfApi().model_info(name, timeout=SECONDS)
    except GatedRepoError:
        return  # loading says how to be admitted
    except RepositoryNotFoundError:
        raise InputError(f"{name} is not a model folder, and the Hugging Face hub has no such model; {KNOWN}") from None
    except HfHubHTTPError:
        return  # the hub answered; loading says what is wrong
    except Exception as error:  # of the client's own HTTP library
        why = type(error).__name__
        raise InputError(
            f"{name} is not a model folder, and the Hugging Face hub was not reached ({why}); {KNOWN}"
        ) from None


def hub_config(name: str) -> Path | None:
    """The config of the model ``name`` on the hub or in its cache; None where it is not to be had. Raises ``InputError`` as
    ``check_hub_id`` does."""
    check_hub_id(name)
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError):
        return None  # loading says what is wrong


KNOWN = f"pass a folder, or one of {', '.join(NAMES)} (see: rasura list models)"


def _near(name: str) -> list[str]:
    """Names of ours, and of model folders beside ``name``, that are written like it."""
    place, _, last = name.rpartition("/")
    start = f"{place}/" if place else "/" if name.startswith("/") else ""
    try:
        folders = [path.name for path in Path(start or ".").iterdir() if (path / "config.json").is_file()]
    except OSError:
        folders = []
    beside = [f"{start}{one}" for one in difflib.get_close_matches(last, folders, 3, 0.7)]
    return [*difflib.get_close_matches(name, NAMES, 2, 0.7), *beside]
