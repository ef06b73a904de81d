"""Keeps track of the part of a streamed answer that a client has, so that another replica can go on after it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ssd_runtime.serving.http.openai.answers.events import DONE, PREFIX, event_of
from ssd_runtime.serving.http.openai.answers.resumption import DeliveredChoice, Resumption


class Stopped(Exception):  # noqa: N818 - the end of a replica, which is no failure of the request
    """A replica ended its stream because it shuts down; another can go on."""


class DeliveredStream:
    """Reads the events of a stream on their way to the client."""

    def __init__(self, keep_token_ids: bool, resumable: bool = True) -> None:
        """Token ids are told to the client only if `keep_token_ids`; without `resumable`, the events have none."""
        self._keep = keep_token_ids
        self._resumable = resumable
        self._about: tuple[str, int] | None = None
        self._choices: dict[int, DeliveredChoice] = {}
        self._usage_told = False
        self._begun = False
        """Whether the client has anything of the answer."""
        self.tokens = 0
        """Number of tokens told."""
        self.done = False
        """Whether the stream is complete."""

    @property
    def resumable(self) -> bool:
        """Whether another replica can go on."""
        return self._resumable or not self._begun

    def resumption(self) -> Resumption | None:
        """The state to go on from; None if the stream has not begun."""
        if self._about is None:
            return None
        choices = {place: replace(choice, tokens=[*choice.tokens]) for place, choice in self._choices.items()}
        return Resumption(id=self._about[0], created=self._about[1], choices=choices)

    def read(self, text: str) -> str:
        """Note the events of `text`; returns what the client is told. Raises Stopped for a replica that shuts down."""
        if text.startswith(PREFIX):
            return "".join(self._event(f"{event}\n\n") for event in text.split("\n\n") if event)
        self._begun = True  # events of a response, which have a name before their data
        return text

    def _event(self, event: str) -> str:
        if event == DONE:
            self.done = True
            return event
        value = json.loads(event.removeprefix(PREFIX))
        if "error" in value:
            if value["error"].get("code") == "shutting_down":
                raise Stopped
            return event
        self._begun = True
        self._about = value["id"], value["created"]
        if not value["choices"]:
            if self._usage_told:
                return ""
            self._usage_told = True
        for choice in value["choices"]:
            self._note(choice)
        return event_of(value)

    def _note(self, choice: dict[str, Any]) -> None:
        """Note one choice of a chunk, and remove what the client did not ask for."""
        noted = self._choices.setdefault(choice["index"], DeliveredChoice())
        tokens = choice.get("token_ids", [])
        noted.tokens += tokens
        self.tokens += len(tokens)
        noted.ended = noted.ended or choice.get("finish_reason") is not None
        if not self._keep:
            choice.pop("token_ids", None)
