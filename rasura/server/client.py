"""The client of a model service: texts and the key stay here, and token ids are sent."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rasura.core.errors import InputError
from rasura.core.given import given_texts
from rasura.server.connection import Connection
from rasura.server.container import CONFIG, DATA, WEIGHTS
from rasura.server.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from rasura.core.batches import Batch


@dataclass(frozen=True)
class Answer:
    """A text's likeliest ``label``, and the ``probabilities`` of all."""

    label: int
    probabilities: tuple[float, ...]


class Client:
    """Talks to a model service: ``Client("http://127.0.0.1:8765", token, key="my.key")``.

    ``key``, the file of ``rasura protect obfuslm``, is needed for methods with texts: ``train``, ``classify``, ``generate``.
    ``allow_http``: send the token to another machine without encryption, which is refused otherwise.
    All methods raise ``InputError``: with the server's reason if it refuses, or if it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        key: str | Path | None = None,
        passphrase: str | None = None,
        timeout: float = 120.0,
        allow_http: bool = False,
    ) -> None:
        self.url, self._key, self._passphrase = url, key, passphrase
        self._server = Connection(url, token, timeout, allow_http=allow_http)
        self._known: dict[str, Mapping[str, Any]] = {}
        self._tokenizers: dict[str, Any] = {}

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def upload(self, folder: str | Path, name: str) -> dict[str, Any]:
        """Upload an obfuscated model folder as ``name``. Only its config and weights are sent."""
        place = Path(folder)
        for file in (CONFIG, WEIGHTS):
            if not (place / file).is_file():
                raise InputError(f"{place} holds no {file}; expected a folder of rasura protect obfuslm")
        from rasura.service_protections.obfuslm.key import PAIR

        try:
            config = json.loads((place / CONFIG).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise InputError(f"{place / CONFIG} is not JSON; expected a folder of rasura protect obfuslm") from None
        if not isinstance(config, dict) or PAIR not in config:
            raise InputError(
                f"{place} is not obfuscated, so a server could read every id; make it with rasura protect obfuslm"
            )
        self._known.pop(name, None)
        return self._server.send("/v1/models", {"name": name}, place, (CONFIG, WEIGHTS))

    def download(self, name: str, folder: str | Path) -> Path:
        """Fetch the model ``name`` as it is on the server, trained or not, into a new ``folder`` (config.json,
        model.safetensors), for ``transformers`` and ``rasura.ObfuscatedTokenizer``. An incomplete download is not kept."""
        target = Path(folder)
        if target.exists():
            raise InputError(f"{target} already exists; remove it or choose another name")
        part = target.resolve().with_name(target.name + ".part")
        try:
            part.mkdir(mode=0o700)
        except FileExistsError:
            raise InputError(f"{part} already exists: another download, or one that was killed; remove it") from None
        except OSError as error:
            raise InputError(f"{target} cannot be written ({error.strerror}); choose another place") from None
        try:
            self._server.receive(f"/v1/models/{_quoted(name)}/files", part)
            part.rename(target)
        except OSError as error:
            raise InputError(f"{target} cannot be written ({error.strerror}); choose another place") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target

    def models(self) -> list[dict[str, Any]]:
        """The tenant's models."""
        found: list[dict[str, Any]] = self._server.ask("GET", "/v1/models")
        return found

    def model(self, name: str) -> Mapping[str, Any]:
        """The server's description of a model: kind, vocabulary, max_length, labels, classes (their names, if any), pair."""
        self._known[name] = self._server.ask("GET", f"/v1/models/{_quoted(name)}")
        return self._known[name]

    @contextmanager
    def _described(self, name: str) -> Iterator[Mapping[str, Any]]:
        """The description of ``name``, which is forgotten if the block is refused: the model may be another one now."""
        try:
            yield self._known[name] if name in self._known else self.model(name)
        except InputError:
            self._known.pop(name, None)
            raise

    def delete(self, name: str) -> None:
        """Delete a model."""
        self._server.ask("DELETE", f"/v1/models/{_quoted(name)}")
        self._known.pop(name, None)

    def train(
        self, name: str, examples: str | Path | Sequence[Any], output: str, *, truncate: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Fine-tune the model ``name`` on ``examples`` (a file, or ``rasura.data.text.Example``s) into ``output``.

        ``settings`` as in ``rasura.server.data.JobSettings``. Returns the job; see ``status`` and ``wait``.
        """
        from rasura.data.text import load_examples, load_labelled
        from rasura.server.data import write

        about = self.model(name)
        chosen: Sequence[Any] = list(examples) if not isinstance(examples, str | Path) else ()
        if isinstance(examples, str | Path):
            labelled = about["kind"] == "classification"
            classes = [str(c) for c in about.get("classes", ())]  # older stores hold none
            chosen = load_labelled(examples, classes, name, count=about["labels"]) if labelled else load_examples(examples)
        rows = self._rows(name, about, chosen, truncate)
        with tempfile.TemporaryDirectory() as place:
            write(rows, Path(place) / DATA)
            head = {"output": output, "settings": settings, "pair": about["pair"]}
            return self._server.send(f"/v1/models/{_quoted(name)}/jobs", head, Path(place), (DATA,))

    def jobs(self) -> list[dict[str, Any]]:
        """The tenant's jobs."""
        found: list[dict[str, Any]] = self._server.ask("GET", "/v1/jobs")
        return found

    def status(self, job: str) -> dict[str, Any]:
        """The state of a job: ``state`` (queued, running, done, failed, cancelled), ``reason``, ``epochs``, and
        ``kept``, the epoch whose weights the model has, as ``rasura.server.judged.judged`` tells it."""
        found: dict[str, Any] = self._server.ask("GET", f"/v1/jobs/{_quoted(job)}")
        return found

    def cancel(self, job: str) -> None:
        """Cancel a job and delete its data on the server."""
        self._server.ask("DELETE", f"/v1/jobs/{_quoted(job)}")

    def wait(self, job: str, *, seconds: float = float("inf"), every: float = 1.0) -> dict[str, Any]:
        """The job after its end. Raises ``InputError`` if it failed, or after ``seconds``."""
        end = time.monotonic() + seconds
        while (found := self.status(job))["state"] in ("queued", "running"):
            if time.monotonic() > end:
                raise InputError(f"the job {job} is still {found['state']} after {seconds:g} s")
            time.sleep(every)
        if found["state"] != "done":
            raise InputError(f"the job {job} {found['state']}: {found['reason']}")
        return found

    def classify(
        self, name: str, texts: Sequence[str], pairs: Sequence[str] | None = None, *, truncate: bool = False
    ) -> list[Answer]:
        """The label of every text (of every pair, with ``pairs``)."""
        from rasura.data.text import Example

        texts = given_texts(texts, "texts", least=0)
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else given_texts(pairs, "pairs", 0)
        out: list[Answer] = []
        with self._described(name) as about:
            rows = self._rows(name, about, [Example(a, b, 0) for a, b in zip(texts, seconds, strict=True)], truncate)
            for some in _requests(rows):
                body: dict[str, Any] = {"pair": about["pair"], "inputs": [row.input_ids[0].tolist() for row in some]}
                if types := [row.token_type_ids[0].tolist() for row in some if row.token_type_ids is not None]:
                    body["types"] = types
                answer = self._server.ask("POST", f"/v1/models/{_quoted(name)}/classify", body)
                out += [Answer(int(p.argmax()), tuple(p.tolist())) for p in _logits(answer, len(some), self.url).softmax(1)]
        return out

    def generate(
        self,
        name: str,
        prompt: str,
        *,
        new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> Iterator[str]:
        """The continuation of ``prompt``, piece by piece."""
        with self._described(name) as about:
            settings = {"new_tokens": new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
            yield from self._continued(name, about, prompt, settings)

    def _continued(self, name: str, about: Mapping[str, Any], prompt: str, settings: Mapping[str, Any]) -> Iterator[str]:
        tokenizer = self._tokenizer(name, about)
        ids = tokenizer(prompt)["input_ids"]
        if len(ids) > 1 and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            # Some tokenizers end every text; what is to go on has not ended.
            ids = ids[:-1]
        body = {"pair": about["pair"], "input": ids, **settings}
        new: list[int] = []
        before, text, shown = tokenizer.decode(ids, skip_special_tokens=True), "", 0
        for token in self._server.stream(f"/v1/models/{_quoted(name)}/generate", body):
            new.append(token)
            # Decoded with the prompt: a first piece alone would lose its space.
            text = tokenizer.decode(ids + new, skip_special_tokens=True)[len(before) :]
            # It may be a character whose bytes have not all come.
            if len(text) > shown and not text.endswith("\ufffd"):
                yield text[shown:]
                shown = len(text)
        if len(text) > shown:
            yield text[shown:]

    def _tokenizer(self, name: str, about: Mapping[str, Any]) -> Any:
        from rasura.service_protections.obfuslm.tokenizer import ObfuscatedTokenizer

        pair = about.get("pair")
        if self._key is None:
            raise InputError("texts need the model's key; pass key, the file of rasura protect obfuslm")
        if not pair:
            raise InputError(
                f"the model {name} is not obfuscated, so the server could read every id; upload an obfuscated one"
            )
        if pair not in self._tokenizers:
            self._tokenizers[pair] = ObfuscatedTokenizer(self._key, self._passphrase, model=pair)
        return self._tokenizers[pair]

    def _rows(self, name: str, about: Mapping[str, Any], examples: Sequence[Any], truncate: bool) -> list[Any]:
        from rasura.data.text import encode
        from rasura.server.data import alike
        from rasura.victims.batching import split

        tokenizer = self._tokenizer(name, about)
        longest = min(about["max_length"], int(tokenizer.model_max_length))
        found: dict[int, Batch] = {}
        for paired in (False, True):  # apart: beside pairs, a text alone would get an empty second one
            places = [k for k, e in enumerate(examples) if bool(e.text_pair) is paired]
            for some in (places[k : k + 256] for k in range(0, len(places), 256)):
                chosen, labels = [examples[k] for k in some], about["labels"]
                coded = encode(
                    chosen, tokenizer, about["kind"], max_length=longest, num_labels=labels, truncate=truncate
                )  # fmt: skip
                found |= zip(some, split(coded))
        return alike([found[k] for k in range(len(examples))])


def _requests(rows: Sequence[Batch]) -> Iterator[list[Batch]]:
    """``rows`` in parts that one request may hold; a text that is too long for any goes alone."""
    some: list[Batch] = []
    size = 0
    for row in rows:
        told = [t[0].tolist() for t in (row.input_ids, row.token_type_ids) if t is not None]
        more = len(json.dumps(told))
        if some and (len(some) == Limits.inputs or size + more > Limits.body_bytes - 1024):  # the rest of the body
            yield some
            some, size = [], 0
        some.append(row)
        size += more
    if some:
        yield some


def _logits(answer: Any, rows: int, url: str) -> Tensor:
    """``(rows, labels)`` as a server told them. Raises ``InputError`` for anything else."""
    import torch

    try:
        found = torch.tensor(answer["logits"], dtype=torch.float64)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError):
        found = torch.empty(0)
    if found.dim() != 2 or len(found) != rows or found.shape[1] < 1 or not bool(found.isfinite().all()):
        raise InputError(f"the answer of {url} does not hold the logits of {rows} texts")
    return found


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
