"""The guard of the service: token, rate and size are checked before any part of a body is read. Plain ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from rasura.server.limits import MIB, Limits, Rates, Refused, Tenants

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that need no token. None of them reveals anything about a tenant."""

DRAINED, DRAIN_SECONDS = 16 * MIB, 2.0
"""Maximum bytes and seconds for which a refused body is still read."""

log = logging.getLogger("rasura.server")


class Guard:
    """Passes a request to ``app`` with its tenant in ``scope["state"]``, or answers with 400, 401, 411, 413, 415 or 429.
    Errors inside are answered with 500, and only their type is logged: a message may quote a body.
    """

    def __init__(self, app: App, tenants: Tenants, limits: Limits) -> None:
        self.app, self.tenants, self.limits = app, tenants, limits
        self.rates = Rates(limits.rate, limits.burst)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, waited=any(name == b"expect" for name, _ in scope["headers"]))
        try:
            scope.setdefault("state", {})["tenant"] = self._admit(scope)
            await self.app(scope, exchange.receive, exchange.send)
        except Refused as refused:
            if not exchange.status:
                await _answer(exchange.send, refused.status, refused.detail)
        except Exception as error:
            log.error("a request failed: %s", type(error).__name__)
            if not exchange.status:
                await _answer(exchange.send, 500, "the server failed")

    def _admit(self, scope: Message) -> str | None:
        headers = dict(scope["headers"])
        path: str = scope["path"]
        if not path.isprintable():
            raise Refused(400, "the path is not text")
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            tenant = None
        else:
            tenant = self.tenants.name(headers.get(b"authorization", b""))
            if tenant is None:
                raise Refused(401, "the token is missing or wrong; expected Authorization: Bearer TOKEN")
            wait = self.rates.wait(tenant)
            if wait:
                raise Refused(429, f"too many requests; try again in {math.ceil(wait)} s")
        if b"content-encoding" in headers:
            raise Refused(415, "a Content-Encoding is not supported; send the plain body")
        length = headers.get(b"content-length")
        if length is None:
            if b"transfer-encoding" in headers or scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS"):
                raise Refused(411, "the size is unknown; expected a Content-Length header")
        elif not length.isdigit():
            raise Refused(400, "the Content-Length is not a number")
        elif len(length) > 18 or int(length) > self._max_bytes(scope["method"], path):
            raise Refused(
                413, f"the body is larger than the {self._max_bytes(scope['method'], path)} bytes that are taken here"
            )
        return tenant

    def _max_bytes(self, method: str, path: str) -> int:
        if method == "POST" and path == "/v1/models":
            return self.limits.model_bytes
        if method == "POST" and path.startswith("/v1/models/") and path.endswith("/jobs"):
            return self.limits.data_bytes
        return self.limits.body_bytes


class _Exchange:
    """One request and its answer. A refusal is followed by reading a little more of the body, unseen: a connection that is
    closed upon a client that still sends may lose it the answer."""

    def __init__(self, receive: Receive, send: Send, *, waited: bool) -> None:
        self._receive, self._send = receive, send
        self.status = 0
        # A client that waits for leave to send its body gets none.
        self._more = not waited

    async def receive(self) -> Message:
        message = await self._receive()
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if message["type"] != "http.response.body" or message.get("more_body") or self.status < 400 or not self._more:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        left = DRAINED
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._more and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _answer(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
