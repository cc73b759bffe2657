"""Runs models for many clients: requests that arrive within milliseconds, or while it is busy, form one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch
from rasura.server.limits import Limits, Refused
from rasura.server.memory import groups, together
from rasura.server.models import opened
from rasura.server.store import Model, Store
from rasura.victims.outputs import predictions

WINDOW = 0.004
"""Seconds for which the first request of a batch waits for others."""

T = TypeVar("T")


@dataclass
class Prompt:
    """One generation: ``ids`` go in, at most ``new_tokens`` come out, the best ones at ``temperature`` 0, else drawn from
    the ``top_k`` likeliest (0: all). ``closed``: the client no longer waits for it."""

    ids: list[int]
    new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int | None = None
    out: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)
    closed: bool = False


class Decoding:
    """Several prompts continued by ``model``, a token each at a ``step``; prompts are padded on the left."""

    def __init__(self, model: nn.Module, prompts: Sequence[Prompt], pad: int) -> None:
        self.model, self.prompts = model, prompts
        self.device = next(model.parameters()).device
        longest = max(len(p.ids) for p in prompts)
        gaps = [longest - len(p.ids) for p in prompts]
        self.next = torch.tensor([[pad] * gap + p.ids for p, gap in zip(prompts, gaps)], device=self.device)
        self.mask = torch.tensor([[0] * gap + [1] * len(p.ids) for p, gap in zip(prompts, gaps)], device=self.device)
        self.positions = (self.mask.cumsum(1) - 1).clamp_min(0)
        self.cache: Any = None
        self.generators = [torch.Generator() for _ in prompts]
        for generator, prompt in zip(self.generators, prompts):
            if prompt.seed is None:
                generator.seed()
            else:
                generator.manual_seed(prompt.seed)

    @torch.no_grad()
    def step(self) -> list[int | Refused]:
        """The next id of every prompt; ``Refused`` for one whose scores are not finite, which ends that prompt alone."""
        # The logits of the last token alone: those of a long prompt would take more than the model.
        found = self.model(
            input_ids=self.next, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.cache = found.past_key_values
        logits = found.logits[:, -1].float().cpu()
        chosen = [_chosen(row, p, g) for row, p, g in zip(logits, self.prompts, self.generators)]
        self.next = torch.tensor([0 if isinstance(c, Refused) else c for c in chosen], device=self.device)[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.next)], 1)
        self.positions = self.positions[:, -1:] + 1
        return chosen


def _chosen(logits: Tensor, prompt: Prompt, generator: torch.Generator) -> int | Refused:
    if not bool(logits.isfinite().all()):
        return not_finite()
    if prompt.temperature == 0:
        return int(logits.argmax())
    kept = logits.double().topk(prompt.top_k if 0 < prompt.top_k < len(logits) else len(logits))
    # At most 0 before they are divided: however small the temperature, none becomes infinite but those that are never drawn.
    shares = ((kept.values - kept.values[0]) / prompt.temperature).softmax(0)
    return int(kept.indices[int(torch.multinomial(shares, 1, generator=generator))])


def not_finite() -> Refused:
    """The refusal of an answer that a model did not give."""
    return Refused(409, "the model's answer is not a finite number; its weights are damaged or its training failed")


class Engine:
    """Models of ``store`` on ``device``, the last used of them in memory; one thread computes.

    No batch takes more memory than ``limits.memory``, by ``rasura.server.memory``: texts that are more go one batch after
    the other, with others' requests in between. More waiting requests than ``limits`` allow, in all or of one tenant, are
    refused (429).
    """

    def __init__(self, store: Store, device: str, limits: Limits) -> None:
        self.store, self.device, self.limits = store, device, limits
        self._models: OrderedDict[str, nn.Module] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._lock = threading.Lock()
        self._texts: dict[str, list[tuple[list[Batch], asyncio.Future[Tensor]]]] = {}
        self._prompts: dict[str, list[Prompt]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def forget(self, model: Model) -> None:
        """Drop a deleted model from memory."""
        await self.run(lambda: self._models.pop(model.id, None))

    async def classify(self, model: Model, rows: list[Batch]) -> Tensor:
        """The logits ``(rows, labels)``."""
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        with self._lock:
            waiting = self._texts.setdefault(model.id, [])
            waiting.append((rows, future))
            first = len(waiting) == 1
        if first:
            self._later(self._classify_all(model))
        with self._counted(model.tenant):
            return await future

    async def generate(self, model: Model, prompt: Prompt) -> AsyncIterator[int]:
        """The new ids, as they come; an id that ends a text is the last."""
        with self._lock:
            waiting = self._prompts.setdefault(model.id, [])
            waiting.append(prompt)
            first = len(waiting) == 1
        if first:
            self._later(self._generate_all(model))
        try:
            with self._counted(model.tenant):
                while (found := await prompt.out.get()) is not None:
                    if isinstance(found, Exception):
                        raise found
                    yield found
        finally:
            prompt.closed = True

    def check_room(self, tenant: str) -> None:
        """Raises ``Refused`` where too many requests wait already."""
        if self._waiting[tenant] >= self.limits.tenant_waiting:
            raise Refused(
                429, f"{self.limits.tenant_waiting} of your requests are waiting for the models; wait until one is answered"
            )
        if self._waiting.total() >= self.limits.waiting:
            raise Refused(429, "too many requests are waiting for the models; try again later")

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        self._waiting[tenant] += 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1

    def _later(self, what: Any) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, what: Callable[[], T]) -> T:
        """Do something in the thread that computes: what touches a library's global settings, for instance."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)

    def _model(self, model: Model) -> nn.Module:
        if model.id not in self._models:
            try:
                self._models[model.id] = opened(self.store.path(model), model.about["kind"], self.device)
            except (OSError, ValueError):  # deleted meanwhile: the libraries raise either
                raise Refused(404, "there is no such model") from None
            while len(self._models) > self.limits.loaded:
                self._models.popitem(last=False)
        self._models.move_to_end(model.id)
        return self._models[model.id]

    async def _classify_all(self, model: Model) -> None:
        await asyncio.sleep(WINDOW)
        taken: list[tuple[list[Batch], asyncio.Future[Tensor]]] = []
        rows: list[Batch] = []

        def begin() -> list[list[int]]:
            # Whoever came while the thread was busy is taken along.
            with self._lock:
                taken.extend(self._texts.pop(model.id))
            rows.extend(row for some, _ in taken for row in some)
            return groups(model.about, [row.input_ids.shape[1] for row in rows], self.limits.memory)

        def answered(some: list[int]) -> Tensor:
            return predictions(self._model(model), [rows[k] for k in some], model.about["pad"])

        try:
            parts = await self.run(begin)
            # One batch at a time, so that other models and requests get their turn in between.
            found = torch.cat([await self.run(partial(answered, some)) for some in parts])
            logits = torch.empty_like(found)
            logits[[k for some in parts for k in some]] = found
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), part in zip(taken, torch.split(logits, [len(some) for some, _ in taken])):
            if not future.done():
                future.set_result(part)

    async def _generate_all(self, model: Model) -> None:
        await asyncio.sleep(WINDOW)
        live: list[Prompt] = []

        def begin() -> Decoding:
            with self._lock:
                everyone = self._prompts.pop(model.id)
                sizes = [(len(p.ids), p.new_tokens) for p in everyone]
                count = together(model.about, sizes, self.limits.memory)
                live.extend(everyone[:count])
                if everyone[count:]:
                    self._prompts[model.id] = everyone[count:]
                    loop.call_soon_threadsafe(lambda: self._later(self._generate_all(model)))
            return Decoding(self._model(model), live, model.about["pad"])

        loop = asyncio.get_running_loop()
        ends, made, finished = set(model.about["ends"]), 0, set[int]()
        try:
            decoding = await self.run(begin)
            while len(finished) < len(live):
                # One step at a time, so that other models and requests get their turn in between.
                ids = await self.run(decoding.step)
                made += 1
                for k, (prompt, token) in enumerate(zip(live, ids)):
                    if k in finished:
                        continue
                    prompt.out.put_nowait(token)
                    if isinstance(token, Refused) or prompt.closed or token in ends or made >= prompt.new_tokens:
                        finished.add(k)
                        prompt.out.put_nowait(None)
        except Exception as error:
            for prompt in live:
                prompt.out.put_nowait(error)
