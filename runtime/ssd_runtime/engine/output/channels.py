"""Reads answers that are written in channels, as GPT-OSS writes them: thoughts, calls of tools, and the final answer.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

A message that has a recipient is a call: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`.
"""

from __future__ import annotations

import json
import re

from ssd_runtime.engine.output.text_stream import beginning_of
from ssd_runtime.loading.loaded_model import CHANNEL, END, MESSAGE, START

TO = " to="
LONGEST_HEAD = 256
"""Characters of a message's head; longer ones are text."""
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
THOUGHTS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
CALL, CALL_END = '<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>\n"
"""A call as other models write it."""


class ChannelReader:
    """Splits text into thoughts and the answer, in which calls are as Hermes writes them, while the text comes."""

    def __init__(self) -> None:
        self._held = ""
        self._kind: str | None = None
        """What the current message is: `thoughts`, `call` or `answer`; None within its head or before it."""

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; returns the thoughts and the answer that are certain by now."""
        self._held += text
        told = {"thoughts": "", "answer": ""}
        while self._advance(told):
            pass
        return told["thoughts"], told["answer"]

    def close(self) -> tuple[str, str]:
        """The rest at the end of the text."""
        rest, self._held = self._held, ""
        return (rest, "") if self._kind == "thoughts" else ("", rest)

    def _advance(self, told: dict[str, str]) -> bool:
        """Read one piece of what is held; returns whether more of it may be read now."""
        if self._kind is None:
            return self._read_head(told)
        places = [place for each in (END, START) if (place := self._held.find(each)) >= 0]
        end = min(places) if places else len(self._held) - max(beginning_of(self._held, each) for each in (END, START))
        told["thoughts" if self._kind == "thoughts" else "answer"] += self._held[:end]
        self._held = self._held[end:]
        if not places:
            return False
        told["answer"] += CALL_END if self._kind == "call" else ""
        self._held = self._held.removeprefix(END)
        self._kind = None
        return True

    def _read_head(self, told: dict[str, str]) -> bool:
        if not any(each.startswith(self._held[: len(each)]) for each in (CHANNEL, TO, START)):
            self._kind = "answer"  # no channels, such as an answer in a given form
            return True
        head, found, rest = self._held.partition(MESSAGE)
        if not found:
            self._kind = "answer" if len(head) > LONGEST_HEAD else None
            return self._kind is not None
        self._held = rest
        if (recipient := RECIPIENT.search(head)) is not None:
            self._kind = "call"
            told["answer"] += CALL.format(json.dumps(recipient[1]))
        else:
            self._kind = "thoughts" if THOUGHTS.search(head) else "answer"
        return True


def said(text: str) -> str:
    """The answer in a text, without what a model has thought in a channel of its own."""
    reader = ChannelReader()
    return reader.feed(text)[1] + reader.close()[1]
