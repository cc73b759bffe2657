"""The service's interface: ``rasura serve``. The one file that knows the web framework."""

# Annotations stay values here: the framework reads those of functions inside a function, where its own names live.

import asyncio
import html
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch

from rasura.core.errors import InputError, MissingExtra
from rasura.server import data, memory, models
from rasura.server.container import CONFIG, CONTENT_TYPE, DATA, WEIGHTS, Incoming, Outgoing, checked_name
from rasura.server.guard import Guard
from rasura.server.inference import Engine, Prompt
from rasura.server.jobs import Supervisor
from rasura.server.limits import Limits, Refused, Tenants
from rasura.server.store import Model, Store, exclusive

_BODY = {"requestBody": {"required": True, "content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}
_FILES: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


def application(store: Store, tenants: Tenants, limits: Limits, device: str = "cpu") -> Any:
    """The service as an ASGI application. Raises ``MissingExtra`` without the extra ``rasura[service]``."""
    try:
        from fastapi import Depends, FastAPI, Request, Response
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
        from fastapi.security import HTTPBearer
        from pydantic import BaseModel, Field
    except ImportError:
        raise MissingExtra("the service needs FastAPI; run: pip install 'rasura[service]'") from None
    engine = Engine(store, device, limits)
    supervisor = Supervisor(store, device)
    arriving: dict[str, int] = {}
    leaving: dict[str, int] = {}

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        supervisor.start()
        yield
        await asyncio.to_thread(supervisor.stop)
        engine.close()

    # The framework's own page loads scripts from elsewhere, into the page where a token would be typed.
    app = FastAPI(
        title="Rasura model service", version="1", docs_url=None, redoc_url=None, lifespan=running,
        description=f"Trains and runs models on token ids. Bodies of {CONTENT_TYPE}: see docs/service.md.",
    )  # fmt: skip
    bearer = [Depends(HTTPBearer(auto_error=False))]

    Id = Annotated[int, Field(strict=True, ge=0)]
    Bit = Annotated[int, Field(strict=True, ge=0, le=1)]

    class Texts(BaseModel):
        """Texts as token ids, special ones included; ``types`` 0 or 1 for each id where texts are pairs."""

        inputs: Annotated[list[list[Id]], Field(min_length=1, max_length=limits.inputs)]
        types: list[list[Bit]] | None = None

    class Start(BaseModel):
        """The beginning of a text as token ids. Temperature 0 takes the likeliest token."""

        input: list[Id]
        new_tokens: Annotated[int, Field(strict=True, ge=1, le=limits.new_tokens)] = 64
        temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
        top_k: Annotated[int, Field(strict=True, ge=0)] = 0
        seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)] | None = None

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Where and what kind; the framework's answer would quote the body.
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        return JSONResponse({"detail": f"{place}: {first['type']}"}, 422)

    def tenant_of(request: Request) -> str:
        found: str = request.scope["state"]["tenant"]
        return found

    async def received(request: Request, place: Path, files: dict[str, int], check: Callable[[dict[str, Any]], None]) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != CONTENT_TYPE:
            raise Refused(415, f"the body must be of {CONTENT_TYPE}; forms, archives and pickles are not taken")
        body = Incoming(request.stream(), int(request.headers["content-length"]))
        head = await body.header(frozenset(files), files)
        check(head)
        await body.save(head["files"], place)
        return head

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server runs."""
        return {"status": "ok"}

    @app.post("/v1/models", status_code=201, dependencies=bearer, openapi_extra=_BODY)
    async def upload(request: Request) -> dict[str, Any]:
        """Upload a model: header {"name", "files"}, then config.json and model.safetensors."""
        tenant = tenant_of(request)
        size = int(request.headers["content-length"])

        def check(head: dict[str, Any]) -> None:
            store.check_free(tenant, checked_name(head.get("name"), "name"))

        if store.bytes_of(tenant) + arriving.get(tenant, 0) + size > limits.tenant_bytes:
            raise Refused(413, f"your models may have {limits.tenant_bytes} bytes together; delete one first")
        arriving[tenant] = arriving.get(tenant, 0) + size
        try:
            with store.incoming() as place:
                files = {CONFIG: limits.body_bytes, WEIGHTS: limits.model_bytes}
                head = await received(request, place, files, check)
                about = await engine.run(lambda: models.checked(place))
                return store.add_model(tenant, head["name"], about, place).told()
        finally:
            arriving[tenant] -= size

    @app.get("/v1/models", dependencies=bearer)
    async def list_models(request: Request) -> list[dict[str, Any]]:
        """Your models."""
        return [model.told() for model in store.models(tenant_of(request))]

    @app.get("/v1/models/{name}", dependencies=bearer)
    async def show_model(request: Request, name: str) -> dict[str, Any]:
        """One of your models."""
        return store.model(tenant_of(request), name).told()

    @app.get("/v1/models/{name}/files", dependencies=bearer, response_class=StreamingResponse, responses=_FILES)
    async def download(request: Request, name: str) -> Any:
        """A model's files: header {"name", "files"}, then config.json and model.safetensors."""
        tenant = tenant_of(request)
        model = store.model(tenant, name)
        if leaving.get(tenant, 0) >= limits.downloads:
            raise Refused(429, f"there are {limits.downloads} downloads that are not finished; wait for one")
        body = Outgoing(store.path(model), {"name": model.name}, (CONFIG, WEIGHTS))

        async def chunks() -> AsyncIterator[bytes]:
            leaving[tenant] = leaving.get(tenant, 0) + 1
            try:
                async for chunk in body:
                    yield chunk
            finally:
                leaving[tenant] -= 1

        return StreamingResponse(chunks(), media_type=CONTENT_TYPE, headers={"Content-Length": str(body.length)})

    @app.delete("/v1/models/{name}", status_code=204, dependencies=bearer, response_class=Response)
    async def delete_model(request: Request, name: str) -> None:
        """Delete a model and its files."""
        await engine.forget(store.delete_model(tenant_of(request), name))

    @app.post("/v1/models/{name}/jobs", status_code=202, dependencies=bearer, openapi_extra=_BODY)
    async def start_job(request: Request, name: str) -> dict[str, Any]:
        """Fine-tune a model into a new one: header {"output", "settings", "files"}, then data.safetensors."""
        tenant = tenant_of(request)
        model = store.model(tenant, name)
        settings: list[data.JobSettings] = []

        def check(head: dict[str, Any]) -> None:
            store.check_free(tenant, checked_name(head.get("output"), "output"))
            settings.append(data.JobSettings.read(head.get("settings", {}), model.about))

        if store.bytes_of(tenant) + model.bytes > limits.tenant_bytes:
            raise Refused(413, f"your models may have {limits.tenant_bytes} bytes together; delete one first")
        with store.incoming() as place:
            head = await received(request, place, {DATA: limits.data_bytes}, check)
            await asyncio.to_thread(data.check, place, model.about, settings[0], limits)
            job = store.add_job(model, head["output"], asdict(settings[0]), place, limits.jobs)
        supervisor.wake()
        return job.told()

    @app.get("/v1/jobs", dependencies=bearer)
    async def list_jobs(request: Request) -> list[dict[str, Any]]:
        """Your jobs."""
        return [job.told() for job in store.jobs(tenant_of(request))]

    @app.get("/v1/jobs/{number}", dependencies=bearer)
    async def show_job(request: Request, number: str) -> dict[str, Any]:
        """State of a job, and the figures of its epochs."""
        return store.job(number, tenant_of(request)).told()

    @app.delete("/v1/jobs/{number}", status_code=204, dependencies=bearer, response_class=Response)
    async def cancel_job(request: Request, number: str) -> None:
        """Cancel a job and delete its data."""
        if not supervisor.cancel(store.job(number, tenant_of(request))):
            raise Refused(409, "the job is at its end already")

    def checked_ids(model: Model, kind: str, texts: list[list[int]], longest: int, new_tokens: int = 0) -> None:
        if model.about["kind"] != kind:
            raise Refused(409, f"this model is not for that; its kind is {model.about['kind']}")
        size = model.about["vocabulary"]
        for number, ids in enumerate(texts):
            if not 1 <= len(ids) <= longest:
                raise Refused(422, f"text {number} must have 1 to {longest} tokens")
            if max(ids) >= size:
                raise Refused(422, f"text {number} has ids outside the vocabulary's 0 .. {size - 1}")
            memory.check_text(model.about, number, len(ids), limits.memory, new_tokens)
        engine.check_room(model.tenant)

    @app.post("/v1/models/{name}/classify", dependencies=bearer)
    async def classify(request: Request, name: str, body: Texts) -> dict[str, Any]:
        """The logits of each text's labels."""
        model = store.model(tenant_of(request), name)
        checked_ids(model, "classification", body.inputs, model.about["max_length"])
        if body.types is not None and [len(t) for t in body.types] != [len(i) for i in body.inputs]:
            raise Refused(422, "types must be as long as inputs")
        types: Sequence[list[int] | None] = body.types or [None] * len(body.inputs)
        rows = [
            data.as_row(torch.tensor(ids), 0, None if one is None else torch.tensor(one))
            for ids, one in zip(body.inputs, types)
        ]
        logits = await engine.classify(model, rows)
        if not bool(logits.isfinite().all()):
            raise Refused(409, "the model's answer is no finite number; its weights or its training went wrong")
        return {"logits": logits.tolist()}

    @app.post("/v1/models/{name}/generate", dependencies=bearer)
    async def generate(request: Request, name: str, body: Start) -> Any:
        """Continue a text: a line {"id"} for each new token as it comes, then {"end": true}."""
        model = store.model(tenant_of(request), name)
        longest = model.about["max_length"] - body.new_tokens
        if longest < 1 and model.about["kind"] == "causal":
            raise Refused(422, f"new_tokens must be below the model's {model.about['max_length']} tokens")
        checked_ids(model, "causal", [body.input], longest, body.new_tokens)
        ids = engine.generate(model, Prompt(body.input, body.new_tokens, body.temperature, body.top_k, body.seed))

        async def lines() -> AsyncIterator[str]:
            async for token in ids:
                yield json.dumps({"id": token}) + "\n"
            yield json.dumps({"end": True}) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_page(app.openapi()))

    return Guard(app, tenants, limits)


def _page(told: dict[str, Any]) -> str:
    """The interface's description as one plain page."""
    rows = "".join(
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code><td>{html.escape(what.get('description', ''))}"
        for path, methods in told["paths"].items()
        for method, what in methods.items()
    )
    about = html.escape(told["info"]["description"])
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(told['info']['title'])}</title>"
        f"<h1>{html.escape(told['info']['title'])}</h1><p>{about} Schemas: <a href=/openapi.json>openapi.json</a>. "
        f"Every request but this page and /health needs <code>Authorization: Bearer TOKEN</code>.</p><table>{rows}</table>"
    )


def serve(
    folder: str | Path, token_file: str | Path, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None,
    device: str = "cpu", ready: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve the store in ``folder`` until interrupted; ``ready`` is called when requests are taken. One process a store; an
    access log is not kept.

    Raises ``InputError`` for a token file that others can read, a store in use, an address that cannot be had.
    """
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("the service needs uvicorn; run: pip install 'rasura[service]'") from None
    tenants = Tenants.read(token_file)
    store = Store(folder)
    with exclusive(store.folder / "server.sqlite", 5.0, f"the store {folder}"):
        store.sweep()
        app = application(store, tenants, limits or Limits(), device)
        config = uvicorn.Config(
            app, host=host, port=port, access_log=False, log_level="warning", server_header=False,
            timeout_graceful_shutdown=5,
        )  # fmt: skip

        class Announced(uvicorn.Server):
            async def startup(self, sockets: list[Any] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    ready()

        server = Announced(config)
        try:
            server.run()
        except SystemExit:
            raise InputError(f"{host}:{port} cannot be served; choose another --port") from None
        finally:
            store.close()
