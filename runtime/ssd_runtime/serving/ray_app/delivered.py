"""Keeps track of the part of a streamed answer that a client has, so that another replica can go on after it."""

from __future__ import annotations

import json
from copy import deepcopy
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
        self._resumption: Resumption | None = None
        """The state to go on from, once the stream has begun."""
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
        return deepcopy(self._resumption)

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
        if self._resumption is None:
            self._resumption = Resumption(id=value["id"], created=value["created"])
        if not value["choices"]:
            if self._usage_told:
                return ""
            self._usage_told = True
        for choice in value["choices"]:
            self._note(choice, self._resumption.choices.setdefault(choice["index"], DeliveredChoice()))
        return event_of(value)

    def _note(self, choice: dict[str, Any], noted: DeliveredChoice) -> None:
        """Note one choice of a chunk, and remove what the client did not ask for."""
        tokens = choice.get("token_ids", [])
        noted.tokens += tokens
        self.tokens += len(tokens)
        noted.ended = noted.ended or choice.get("finish_reason") is not None
        if not self._keep:
            choice.pop("token_ids", None)
