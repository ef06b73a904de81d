"""The parts of an answer in which tools are called, and what finds them as the text comes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from ssd_profiles.prompts import is_text
from ssd_runtime.engine.output.text_stream import beginning_of


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool, with the first part of its arguments, which are a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid4().hex[:9])
    """Nine letters and digits, since Mistral's templates refuse all others."""


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """A further part of the latest call's arguments."""

    arguments: str


Part = str | ParsedCall | MoreArguments


def as_json(value: Any) -> str:
    """A value as JSON; letters stay as they are, but for halves of characters, which no answer can carry."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)


def joined(parts: Sequence[Part]) -> tuple[str, list[ParsedCall]]:
    """The text and the whole calls of an answer's parts."""
    calls = list[ParsedCall]()
    for part in parts:
        if isinstance(part, ParsedCall):
            calls.append(part)
        elif isinstance(part, MoreArguments):
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    return "".join(part for part in parts if isinstance(part, str)), calls


class CallReader(ABC):
    """Splits text into what the user reads and calls; text that does not begin a call stays text.

    A call is told once its name is known, and its arguments as they come, valid or not.
    """

    def __init__(self, most: int | None = None) -> None:
        """Calls after the first `most` are dropped."""
        self._most = most
        self._held = ""
        self._blank = ""
        """White space after a call, which is only kept if text follows it."""
        self.calls = 0
        """Number of calls so far."""

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain by now."""
        # Blanks after a blank decide nothing, and a model may write thousands.
        decides = not (text.isspace() and self._held[-1:].isspace())
        self._held += text
        parts = list[Part]()
        while decides and self._advance(parts):
            pass
        return self._kept(parts)

    def close(self) -> list[Part]:
        """The rest at the end of the answer; a call may end there without its closing mark."""
        rest = self._rest()
        self._held = ""
        return self._kept(rest)

    @abstractmethod
    def _advance(self, parts: list[Part]) -> bool:
        """Read one piece of what is held; returns whether more of it may be read now."""

    @abstractmethod
    def _rest(self) -> list[Part]:
        """The parts of what is held at the end."""

    def _read_to(self, marks: Collection[str], parts: list[Part]) -> str | None:
        """Read text up to the first of the marks, and return that; None if none has come whole."""
        found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        begun = max(beginning_of(self._held, mark) for mark in marks)
        place, first = min(found) if found else (len(self._held) - begun, None)
        parts.append(self._held[:place])
        self._held = self._held[place:]
        return first

    def _kept(self, parts: Sequence[Part]) -> list[Part]:
        """Parts without empty text, white space around calls, and calls beyond the limit."""
        kept = list[Part]()
        for part in parts:
            if isinstance(part, str):
                if self.calls and not part.strip():
                    self._blank += part
                elif part:
                    kept.append(self._blank + part)
                    self._blank = ""
                continue
            if isinstance(part, ParsedCall):
                self.calls += 1
                self._blank = ""
            if self._most is not None and self.calls > self._most:
                continue
            if isinstance(part, MoreArguments) and kept and isinstance(last := kept[-1], MoreArguments | ParsedCall):
                kept[-1] = replace(last, arguments=last.arguments + part.arguments)
            elif part != MoreArguments(""):
                kept.append(part)
        return kept
