"""Server-sent events of streamed answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
PREFIX = "data: "
DONE = f"{PREFIX}[DONE]\n\n"
"""The event that ends every stream."""


def event_of(value: Mapping[str, Any]) -> str:
    """The event that carries a JSON object."""
    return f"{PREFIX}{json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
