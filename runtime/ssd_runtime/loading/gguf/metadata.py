"""The metadata of a file's architecture: every key is used, known to be harmless, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from ssd_profiles.errors import UserError
from ssd_runtime.weights.gguf.header import ADVICE, FOLDER_INSTEAD
from ssd_runtime.weights.gguf.index import GgufIndex

T = TypeVar("T", int, float, str, bool)


class Metadata:
    """The keys `PREFIX.*` of a file, which are taken one by one; `require_all_taken` names what is left."""

    def __init__(self, index: GgufIndex, prefix: str, by_layer: Iterable[str] = ()) -> None:
        """Lists under the keys `by_layer` may differ by layer: `optional` returns their first values."""
        self._by_layer = frozenset(by_layer)
        self._path = index.path
        self._prefix = f"{prefix}."
        self._values = {key: value for key, value in index.metadata.items() if key.startswith(self._prefix)}
        self._tensors = index.tensors
        self._taken = set[str]()

    def optional(self, kind: type[T], key: str, beside: T | None = None) -> T | None:
        """The value of a key; None without it. A list of equal values, one for each layer, counts as one value.

        Values `beside` stand in such a list for layers that have none. Raises UserError if it is of another type.
        """
        self._taken.add(key)
        value = self._values.get(self._prefix + key)
        if value is None:
            return None
        if isinstance(value, list):
            distinct = list(dict.fromkeys(each for each in value if each != beside))
            if len(distinct) != 1 and (key not in self._by_layer or not distinct):
                raise self.refusal(key, "differs by layer, which")
            value = distinct[0]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self._path}: {self._prefix}{key} is {value!r}, expected {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refusal(key, f"is {value}, which")
        if isinstance(value, str) and not value.isascii() and value != value.encode(errors="replace").decode():
            raise UserError(f"{self._path}: {self._prefix}{key} is not UTF-8; {ADVICE}")
        return value

    def required(self, kind: type[T], key: str) -> T:
        """The value of a key. Raises UserError without it."""
        value = self.optional(kind, key)
        if value is None:
            raise UserError(f"{self._path}: lacks the metadata {self._prefix}{key}; convert it again")
        return value

    def count(self, key: str) -> int:
        """A required number above zero."""
        value = self.required(int, key)
        if value < 1:
            raise UserError(f"{self._path}: {self._prefix}{key} is {value}, expected at least 1")
        return value

    def listed(self, key: str) -> list[Any] | None:
        """The list under a key; None if there is no list."""
        value = self._values.get(self._prefix + key)
        if not isinstance(value, list):
            return None
        self._taken.add(key)
        return list(value)

    def expect(self, key: str, *accepted: object) -> None:
        """Take a key that may be missing. Raises UserError if its value is not one of `accepted`."""
        value = self._values.get(self._prefix + key)
        self._taken.add(key)
        if value is not None and value not in accepted:
            raise self.refusal(key, f"is {value!r}, which")

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self._tensors

    @property
    def largest(self) -> int:
        """The largest dimension of a tensor of the file."""
        return max(max(place.shape) for place in self._tensors.values())

    def ignore(self, keys: Iterable[str]) -> None:
        """Take keys that change nothing in what a model computes."""
        self._taken.update(keys)

    @property
    def left(self) -> list[str]:
        """The keys that were not taken yet."""
        return sorted({key.removeprefix(self._prefix) for key in self._values} - self._taken)

    def require_all_taken(self) -> None:
        """Raise UserError if a key was not taken."""
        if self.left:
            raise self.refusal(self.left[0], "is not known here and")

    def refusal(self, key: str, why: str) -> UserError:
        """The error for a key whose value cannot be followed."""
        return UserError(f"{self._path}: the metadata {self._prefix}{key} {why} is not supported; {FOLDER_INSTEAD}")
