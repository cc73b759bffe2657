"""The service's interface: ``rasura serve``. Only this file uses the web framework."""

# Annotations stay values here: the framework reads those of functions inside a function, where its own names live.

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rasura.core.errors import InputError, MissingExtra
from rasura.server import data, models
from rasura.server.container import CONFIG, CONTENT_TYPE, DATA, WEIGHTS, Outgoing, checked_name
from rasura.server.guard import Guard
from rasura.server.inference import Prompt
from rasura.server.limits import Limits, Refused, Tenants
from rasura.server.lock import exclusive
from rasura.server.page import page
from rasura.server.service import Service, check_pair
from rasura.server.store import Store

_BODY = {"requestBody": {"required": True, "content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}
_FILES: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


def application(store: Store, tenants: Tenants, limits: Limits, device: str = "cpu") -> Any:
    """The service as an ASGI application. Raises ``MissingExtra`` without the extra ``rasura[service]``."""
    try:
        from fastapi import FastAPI
        from fastapi.responses import HTMLResponse
    except ImportError:
        raise MissingExtra("the service needs FastAPI; run: pip install 'rasura[service]'") from None
    service = Service.of(store, limits, device)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        service.supervisor.start()
        yield
        await asyncio.to_thread(service.supervisor.stop)
        service.engine.close()

    # The framework's own page loads scripts from elsewhere, into the page where a token would be typed.
    app = FastAPI(
        title="Rasura model service", version="1", docs_url=None, redoc_url=None, lifespan=running,
        description=f"Trains and runs models on token ids. Bodies of {CONTENT_TYPE}: see docs/service.md.",
    )  # fmt: skip
    _answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server runs."""
        return {"status": "ok"}

    for router in (_models, _jobs, _inference):
        app.include_router(router(service))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

    return Guard(app, tenants, limits)


def _answer_errors(app: Any) -> None:
    """Answer refusals, and bodies of another form, in one line of ours."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status)

    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Where and what kind; the framework's answer would quote the body.
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        return JSONResponse({"detail": f"{place}: {first['type']}"}, 422)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(RequestValidationError, invalid)


def _bearer() -> list[Any]:
    """What a router's requests need: the door has looked at the token, this says so in the interface's description."""
    from fastapi import Depends
    from fastapi.security import HTTPBearer

    return [Depends(HTTPBearer(auto_error=False))]


def _tenant(request: Any) -> str:
    """Who asks, as the door found out."""
    found: str = request.scope["state"]["tenant"]
    return found


async def _received(
    request: Any, service: Service, place: Path, files: dict[str, int], check: Callable[[dict[str, Any]], None]
) -> Any:
    """The header of a request's body, after ``check``; its ``files`` are saved in ``place``."""
    return await service.received(request.headers, request.stream(), place, files, check)


def _models(service: Service) -> Any:
    """The routes of models: upload, list, show, download, delete."""
    from fastapi import APIRouter, Request, Response
    from fastapi.responses import StreamingResponse

    router = APIRouter(dependencies=_bearer())
    store, limits = service.store, service.limits

    @router.post("/v1/models", status_code=201, openapi_extra=_BODY)
    async def upload(request: Request) -> dict[str, Any]:
        """Upload a model: header {"name", "files"}, then config.json and model.safetensors."""
        tenant = _tenant(request)

        def check(head: dict[str, Any]) -> None:
            store.check_free(tenant, checked_name(head.get("name"), "name"))

        with service.room(tenant, int(request.headers["content-length"])), store.incoming() as place:
            files = {CONFIG: limits.body_bytes, WEIGHTS: limits.model_bytes}
            head = await _received(request, service, place, files, check)
            about = await service.engine.run(lambda: models.checked(place))
            return store.add_model(tenant, head["name"], about, place).to_dict()

    @router.get("/v1/models")
    async def list_models(request: Request) -> list[dict[str, Any]]:
        """Your models."""
        return [model.to_dict() for model in store.models(_tenant(request))]

    @router.get("/v1/models/{name}")
    async def show_model(request: Request, name: str) -> dict[str, Any]:
        """One of your models."""
        return store.model(_tenant(request), name).to_dict()

    @router.get("/v1/models/{name}/files", response_class=StreamingResponse, responses=_FILES)
    async def download(request: Request, name: str) -> Any:
        """A model's files: header {"name", "files"}, then config.json and model.safetensors."""
        tenant = _tenant(request)
        model = store.model(tenant, name)
        service.check_downloads(tenant)
        body = Outgoing(store.path(model), {"name": model.name}, (CONFIG, WEIGHTS))
        headers = {"Content-Length": str(body.length)}
        return StreamingResponse(service.sent(tenant, body), media_type=CONTENT_TYPE, headers=headers)

    @router.delete("/v1/models/{name}", status_code=204, response_class=Response)
    async def delete_model(request: Request, name: str) -> None:
        """Delete a model and its files."""
        await service.engine.forget(store.delete_model(_tenant(request), name))

    return router


def _jobs(service: Service) -> Any:
    """The routes of jobs: start, list, show, cancel."""
    from fastapi import APIRouter, Request, Response

    router = APIRouter(dependencies=_bearer())
    store, limits = service.store, service.limits

    @router.post("/v1/models/{name}/jobs", status_code=202, openapi_extra=_BODY)
    async def start_job(request: Request, name: str) -> dict[str, Any]:
        """Fine-tune a model into a new one: header {"output", "settings", "pair", "files"}, then data.safetensors."""
        tenant = _tenant(request)
        model = store.model(tenant, name)
        settings: list[data.JobSettings] = []

        def check(head: dict[str, Any]) -> None:
            check_pair(model, head.get("pair"))
            store.check_free(tenant, checked_name(head.get("output"), "output"))
            settings.append(data.JobSettings.read(head.get("settings", {}), model.about))

        service.check_bytes(tenant, store.bytes_of(tenant) + model.trained)
        with store.incoming() as place:
            head = await _received(request, service, place, {DATA: limits.data_bytes}, check)
            await asyncio.to_thread(data.check, place, model.about, settings[0], limits)
            room = limits.tenant_bytes - service.arriving[tenant]
            job = store.add_job(model, head["output"], asdict(settings[0]), place, limits.jobs, room)
        service.supervisor.wake()
        return job.to_dict()

    @router.get("/v1/jobs")
    async def list_jobs(request: Request) -> list[dict[str, Any]]:
        """Your jobs."""
        return [job.to_dict() for job in store.jobs(_tenant(request))]

    @router.get("/v1/jobs/{number}")
    async def show_job(request: Request, number: str) -> dict[str, Any]:
        """State of a job, and the figures of its epochs."""
        return store.job(number, _tenant(request)).to_dict()

    @router.delete("/v1/jobs/{number}", status_code=204, response_class=Response)
    async def cancel_job(request: Request, number: str) -> None:
        """Cancel a job and delete its data."""
        if not await asyncio.to_thread(service.supervisor.cancel, store.job(number, _tenant(request))):
            raise Refused(409, "the job has already ended")

    return router


def _inference(service: Service) -> Any:
    """The routes that ask a model: classify and generate."""
    from fastapi import APIRouter, Request
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel, Field

    router = APIRouter(dependencies=_bearer())
    limits = service.limits
    Id = Annotated[int, Field(strict=True, ge=0)]
    Bit = Annotated[int, Field(strict=True, ge=0, le=1)]

    class Encoded(BaseModel):
        """``pair``: that of the model which the ids were encoded for; for any other model they are refused."""

        pair: str | None = None

    class Texts(Encoded):
        """Texts as token ids, special ones included; ``types`` 0 or 1 for each id where texts are pairs."""

        inputs: Annotated[list[list[Id]], Field(min_length=1, max_length=limits.inputs)]
        types: list[list[Bit]] | None = None

    class Start(Encoded):
        """The beginning of a text as token ids. Temperature 0 takes the likeliest token."""

        input: list[Id]
        new_tokens: Annotated[int, Field(strict=True, ge=1, le=limits.new_tokens)] = 64
        temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
        top_k: Annotated[int, Field(strict=True, ge=0)] = 0
        seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)] | None = None

    @router.post("/v1/models/{name}/classify")
    async def classify(request: Request, name: str, body: Texts) -> dict[str, Any]:
        """The logits of each text's labels."""
        model = service.model(_tenant(request), name, body.pair)
        return {"logits": await service.classified(model, body.inputs, body.types)}

    @router.post("/v1/models/{name}/generate")
    async def generate(request: Request, name: str, body: Start) -> Any:
        """Continue a text: a line {"id"} for each new token, then {"end": true}, or {"error"} where it was cut off."""
        model = service.model(_tenant(request), name, body.pair)
        prompt = Prompt(body.input, body.new_tokens, body.temperature, body.top_k, body.seed)
        return StreamingResponse(await service.continued(model, prompt), media_type="application/x-ndjson")

    return router


def serve(
    folder: str | Path, token_file: str | Path, *, host: str = "127.0.0.1", port: int = 8765, limits: Limits | None = None,
    device: str = "cpu", ready: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve the store in ``folder`` until interrupted; ``ready`` is called when requests are accepted. Only one process can
    serve a store. No access log is kept.

    Raises ``InputError`` for a token file that others can read, a store in use, or an address that is not available.
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
