"""The page on `/`: one HTML file that loads nothing, with a policy that lets it run its own script and no other."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from offramp.common.formatting import millions
from offramp.running.bundle import Bundle
from offramp.serve.service import Service


@dataclass(frozen=True)
class Page:
    """The HTML, and the content security policy to send with it."""

    html: str
    security: str


def build_page(bundle: Bundle, service: Service) -> Page:
    """The page for a bundle."""
    style, script = _asset("page.css"), _asset("page.js")
    name = str(bundle.card.model.get("name") or "classifier")
    facts = (
        f"{len(bundle.classes)} classes, {len(bundle.costs)} exits, "
        f"{millions(bundle.costs[0])} to {millions(bundle.costs[-1])} mul-adds per image."
    )
    html = Template(_asset("page.html")).substitute(
        title=escape(name),
        facts=escape(facts),
        footer="Also here: <code>POST /predict</code>, <code>/metrics</code>, <code>/openapi.json</code>.",
        style=style,
        script=script,
        data=_data(bundle, service),
    )
    return Page(html, _security(style, script))


def _asset(name: str) -> str:
    return (resources.files("offramp.serve") / name).read_text(encoding="utf-8")


def _data(bundle: Bundle, service: Service) -> str:
    value = {
        "reveal": service.config.reveal_exit,
        "costs": bundle.costs,
        "calibration": service.metrics.expected,
    }
    return json.dumps(value).replace("<", "\\u003c")


def _security(style: str, script: str) -> str:
    rules = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "img-src": "blob: data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
