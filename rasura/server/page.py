"""The service's page at ``/docs``. Standard library only."""

from __future__ import annotations

import html
from typing import Any


def page(told: dict[str, Any]) -> str:
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
