"""The form of a model's tool calls, from what its chat template writes for some that we know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from ssd_runtime.serving.http.openai.calls.call_forms import CallForm, ElementCall, JsonCall, NamedCall

NAME = "probe_tool"
TEXT, NUMBER = "one value", 42
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Answers",
        "parameters": {
            "type": "object",
            "properties": {"first_key": {"type": "string"}, "second_key": {"type": "integer"}},
            "required": ["first_key", "second_key"],
        },
    },
}
ARGUMENTS = r'\{\s*"first_key"\s*:\s*"one value"\s*,\s*"second_key"\s*:\s*42\s*\}'
JSON_CALL = re.compile(rf'\{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"(arguments|parameters)"\s*:\s*{ARGUMENTS}[^{{}}]*\}}')
NAMED_CALL = re.compile(rf"{NAME}((?s:.){{0,80}}?){ARGUMENTS}")
ELEMENT_CALL = re.compile(rf"{NAME}((?s:.)*?)first_key((?s:.)*?){TEXT}((?s:.)*?)second_key((?s:.)*?){NUMBER}")

PROBED = re.compile(f"{NAME}|{TEXT}|first_key|second_key")
"""Parts of the probe that no text of a form may have."""


def conversation(calls: int) -> list[dict[str, Any]]:
    """A question, and an answer of so many calls; 0 for one of text."""
    call = {"type": "function", "function": {"name": NAME, "arguments": {"first_key": TEXT, "second_key": NUMBER}}}
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else "QQQ"}
    if calls:
        answer["tool_calls"] = [{"id": f"abcdefgh{number}", **call} for number in range(calls)]
    return [{"role": "user", "content": "Hello?"}, answer]


def form_of(write: Callable[[int], str], control: Mapping[str, int], ends: frozenset[int]) -> CallForm | None:
    """The form of calls; None if a template writes none, or none that a form can express.

    `write` returns what the template writes for `conversation`, empty if it refuses it. `control` has the ids of
    control tokens by their texts, and `ends` those that end an answer.
    """
    text, one, two = write(0), write(1), write(2)
    if not (text and one):
        return None
    single = _answer(one, text, control)
    double = _answer(two, text, control) if two else ""
    for pattern in (JSON_CALL, NAMED_CALL, ELEMENT_CALL):
        if (found := pattern.search(single)) is None:
            continue
        call = _call(pattern, found, single[found.end() :])
        if call is None:
            return None
        cut = len(call.after_value) if isinstance(call, ElementCall) else 0
        closing = single[found.end() + cut :]
        ended = [closing.find(end) for end, token in control.items() if token in ends and end in closing]
        closing = closing[: min(ended)] if ended else closing
        matches = list(pattern.finditer(double))
        between = double[matches[0].end() + cut : matches[1].start()] if len(matches) == 2 else None
        if isinstance(call, JsonCall) and between is not None and not _separates(between, closing.strip()):
            between = None
        form = CallForm(single[: found.start()].lstrip("\n"), between, closing, call)
        return None if PROBED.search(str(form)) else form
    return None


def _separates(between: str, closing: str) -> bool:
    """Whether calls that are JSON objects are told apart by this text."""
    return between.strip() == "," or (closing != "" and closing in between)


def _answer(whole: str, other: str, control: Mapping[str, int]) -> str:
    """The part of `whole` between the beginning and the end that it shares with `other`; control tokens stay whole."""
    begin = shared(whole, other)
    end = len(whole) - shared(whole[begin:][::-1], other[begin:][::-1])
    for token in control:
        if 0 <= (place := whole.find(token, max(0, begin - len(token) + 1), begin + len(token) - 1)) < begin:
            begin = place
        if 0 <= (place := whole.find(token, max(0, end - len(token) + 1), end + len(token) - 1)) < end:
            end = max(end, place + len(token))
    return whole[begin:end]


def shared(one: str, two: str) -> int:
    """Number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _call(pattern: re.Pattern[str], found: re.Match[str], tail: str) -> JsonCall | NamedCall | ElementCall | None:
    if pattern is JSON_CALL:
        return JsonCall(found[1])
    if pattern is NAMED_CALL:
        return NamedCall(found[1])
    after_name, after_key, middle, after_second = found.groups()
    before_key = middle[len(middle) - shared(after_name[::-1], middle[::-1]) :]
    after_value = middle.removesuffix(before_key)
    if after_key != after_second or not (before_key and after_key and after_value) or not tail.startswith(after_value):
        return None
    return ElementCall(after_name.removesuffix(before_key), before_key, after_key, after_value)
