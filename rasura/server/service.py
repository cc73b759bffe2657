"""What the routes of the service share: one value that holds the store, the engine, the jobs and the limits."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rasura.server import data, memory
from rasura.server.container import CONTENT_TYPE, Incoming, Outgoing
from rasura.server.inference import Engine, Prompt, not_finite
from rasura.server.jobs import Supervisor
from rasura.server.limits import Limits, Refused
from rasura.server.store import Model, Store

log = logging.getLogger("rasura.server")


@dataclass(frozen=True)
class Service:
    """A running service without its web framework. Anything that a tenant may not do raises ``Refused``.

    ``arriving``: bytes of each tenant that are being uploaded; ``leaving``: downloads of each that are not finished.
    """

    store: Store
    limits: Limits
    engine: Engine
    supervisor: Supervisor
    arriving: Counter[str] = field(default_factory=Counter)
    leaving: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, store: Store, limits: Limits, device: str) -> Service:
        """The service of ``store``, whose models run and are trained on ``device``."""
        return cls(store, limits, Engine(store, device, limits), Supervisor(store, device))

    def model(self, tenant: str, name: str, pair: str | None) -> Model:
        """The tenant's model ``name``. ``pair``: the model that its request's ids were encoded for; None: not told."""
        found = self.store.model(tenant, name)
        check_pair(found, pair)
        return found

    def check_bytes(self, tenant: str, total: int) -> None:
        """Refuse (413) more bytes of models than one tenant may have."""
        if total > self.limits.tenant_bytes:
            raise Refused(413, f"your models may have at most {self.limits.tenant_bytes} bytes in total; delete one first")

    @contextmanager
    def room(self, tenant: str, size: int) -> Iterator[None]:
        """``size`` bytes for what arrives inside the block, so that uploads at the same time count together."""
        self.check_bytes(tenant, self.store.bytes_of(tenant) + self.arriving[tenant] + size)
        self.arriving[tenant] += size
        try:
            yield
        finally:
            self.arriving[tenant] -= size

    async def received(
        self, headers: Mapping[str, str], stream: AsyncIterator[bytes], place: Path, files: dict[str, int],
        check: Callable[[dict[str, Any]], None],
    ) -> Any:  # fmt: skip
        """The header of a body, after ``check``; its files, of the names and at most the bytes of ``files``, lie in
        ``place``."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != CONTENT_TYPE:
            raise Refused(415, f"the body must have the type {CONTENT_TYPE}; forms, archives and pickles are not accepted")
        body = Incoming(stream, int(headers["content-length"]))
        head = await body.header(frozenset(files), files)
        check(head)
        await body.save(head["files"], place)
        return head

    def check_downloads(self, tenant: str) -> None:
        """Refuse (429) another download beside as many as a tenant may have."""
        if self.leaving[tenant] >= self.limits.downloads:
            raise Refused(429, f"{self.limits.downloads} downloads are not finished; wait until one ends")

    async def sent(self, tenant: str, body: Outgoing) -> AsyncIterator[bytes]:
        """The chunks of ``body``, a download that is counted until it ends."""
        self.leaving[tenant] += 1
        try:
            async for chunk in body:
                yield chunk
        finally:
            self.leaving[tenant] -= 1

    async def classified(self, model: Model, inputs: list[list[int]], types: list[list[int]] | None) -> list[list[float]]:
        """The logits of each text's labels."""
        self._check_ids(model, "classification", inputs, model.about["max_length"])
        if types is not None and [len(t) for t in types] != [len(i) for i in inputs]:
            raise Refused(422, "types must be as long as inputs")
        segments: Sequence[list[int] | None] = types or [None] * len(inputs)
        rows = [
            data.as_row(torch.tensor(ids), 0, None if one is None else torch.tensor(one))
            for ids, one in zip(inputs, segments)
        ]
        logits = await self.engine.classify(model, rows)
        if not bool(logits.isfinite().all()):
            raise not_finite()
        found: list[list[float]] = logits.tolist()
        return found

    async def continued(self, model: Model, prompt: Prompt) -> AsyncIterator[str]:
        """The lines of an answer to ``prompt``: its new tokens as they come, then the end, or the error that ended them.

        They begin when the first token is there. So what fails before is an answer of its own, with its status.
        """
        longest = model.about["max_length"] - prompt.new_tokens
        if longest < 1 and model.about["kind"] == "causal":
            raise Refused(422, f"new_tokens must be below the model's {model.about['max_length']} tokens")
        self._check_ids(model, "causal", [prompt.ids], longest, prompt.new_tokens)
        ids = self.engine.generate(model, prompt)
        return _lines(await anext(ids), ids)

    def _check_ids(self, model: Model, kind: str, texts: list[list[int]], longest: int, new_tokens: int = 0) -> None:
        if model.about["kind"] != kind:
            raise Refused(409, f"this model cannot do that; its kind is {model.about['kind']}")
        size = model.about["vocabulary"]
        for number, ids in enumerate(texts):
            if not 1 <= len(ids) <= longest:
                raise Refused(422, f"text {number} must have 1 to {longest} tokens")
            if max(ids) >= size:
                raise Refused(422, f"text {number} has ids outside the vocabulary's 0 .. {size - 1}")
            memory.check_text(model.about, number, len(ids), self.limits.memory, new_tokens)
        self.engine.check_room(model.tenant)


def check_pair(model: Model, pair: Any) -> None:
    """Raises ``Refused`` (409) where ids that were encoded for the model ``pair`` come to another one."""
    if pair is not None and pair != model.about.get("pair"):
        raise Refused(409, "the model of this name is another one than these ids are for; try again with that model's key")


async def _lines(first: int, ids: AsyncIterator[int]) -> AsyncIterator[str]:
    """A line for each id, and one for how they ended."""
    yield _line(id=first)
    try:
        async for token in ids:
            yield _line(id=token)
    except Refused as refused:
        yield _line(error=refused.detail)
    except Exception as error:  # only its type is logged: a message may quote a body
        log.error("a generation failed: %s", type(error).__name__)
        yield _line(error="the server failed")
    else:
        yield _line(end=True)


def _line(**told: int | str | bool) -> str:
    return json.dumps(told) + "\n"
