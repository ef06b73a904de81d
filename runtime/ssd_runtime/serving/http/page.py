"""The chat page at `/`: one static file, which asks this server and no other."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILE = Path(__file__).with_name("page.html")


def page_route() -> Route:
    """The route of the page, which holds no data and so needs no key.

    Browsers run its own script and no other, and let it reach this server alone.
    """
    text = FILE.read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        *(f"{kind}-src {_hash(text, kind)}" for kind in ("script", "style")),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def respond(request: Request) -> Response:
        return Response(text, media_type="text/html", headers=headers)

    return Route("/", respond, methods=["GET"])


def _hash(text: str, tag: str) -> str:
    """The hash of the page's one `<tag>` element, as a policy names it."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
