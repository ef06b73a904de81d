"""API keys: who may use a server, and whose requests share what was learned."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from hashlib import sha256

from ssd_profiles.errors import UserError

KEY_VARIABLE = "SSD_API_KEY"


class ApiKeys:
    """The keys of a server; without any, everybody may use it."""

    def __init__(self, keys: Sequence[str] = (), shared: bool = False) -> None:
        """With `shared`, requests of all keys form one stream."""
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._shared = shared

    def stream_of(self, authorization: str | None) -> str | None:
        """The stream of the requests with an `Authorization` header; None if the header has no valid key.

        Every key is compared, each in constant time: the answer's time does not depend on how much of a key was right.
        """
        if not self._digests:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = sha256(given.strip().encode(errors="replace")).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            return None
        return "" if self._shared else f"key {found.index(True) + 1}"


def read_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The given keys, else those of the environment, without spaces around them.

    Raises UserError for an empty key or one that is not ASCII, and for a variable that is set but names no key: who
    sets it means to keep others out.
    """
    named = os.environ.get(KEY_VARIABLE)
    if given or named is None:
        keys = tuple(key.strip() for key in given or ())
    elif not (keys := tuple(key.strip() for key in named.split(",") if key.strip())):
        raise UserError(f"{KEY_VARIABLE}: it is set, but names no key; give one, or unset it")
    if not all(key and key.isascii() for key in keys):
        raise UserError("--api-key: a key is text of ASCII characters that is not empty; give another")
    return keys
