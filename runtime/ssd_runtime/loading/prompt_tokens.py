"""Encodes prompts, in which control tokens that a user's text spells stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ssd_profiles.errors import UserError, first_line
from ssd_runtime.templates.renderer import TemplateLimits, TemplateRefused, TemplateRenderer

CONTEXT = (
    '{{ {"messages": messages, "tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}'
    " | tojson(ensure_ascii=true) }}"
)
"""A template of our own, from which the installed transformers tells what it hands to templates."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a chat template has written it."""

    text: str
    is_marked: bool
    """Whether marks stand in control tokens that messages spell."""


PIECE = 1 << 14
"""Characters of the pieces in which the tokens of a long text are counted."""
DEEPEST = 16
"""Most levels of a pattern of control tokens."""
TRIES = 100
"""Random marks that are tried for one that spells no control token itself."""


class TooLongError(UserError):
    """A text has far more tokens than the most that were allowed."""


class PromptTokens:
    """Encodes conversations and texts.

    The control tokens that a chat template writes take effect. Those that a message spells, such as `<|im_end|>`, would
    let its author end it and begin another one. A mark is therefore put into each of them before the template sees the
    message. A copy of the tokenizer drops the marks after it has looked for control tokens, so that the ids are those
    of the text as a whole. The mark is a random number, which no author can guess and no template changes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Collection[int] = (),
        allow_special: bool = False,
        limits: TemplateLimits | None = None,
    ) -> None:
        """`end_ids` are control tokens in any case; with `allow_special`, those that texts spell take effect."""
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer(limits)
        self._allow_special = allow_special
        added = tokenizer.added_tokens_decoder.items()
        control = {token: each for token, each in added if each.special or token in end_ids}
        self.control: Mapping[str, int] = {each.content: token for token, each in control.items()}
        """Ids of control tokens by their texts."""
        self.added: Mapping[str, int] = {each.content: token for token, each in added}
        """Ids of all tokens that are found in a text before it is split, by their texts."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        found_late = any(each.normalized for each in control.values())
        self._normalizer = backend.normalizer if backend is not None and found_late else None
        """The normaliser after which some control tokens are looked for; None for none."""
        # A text of one character cannot be parted.
        parted = [text for text in self.control if len(text) > 1]
        self._spelled = re.compile(any_of(parted))
        self._beginnings = frozenset(text[:length] for text in parted for length in range(1, len(text)))
        self._longest = max(map(len, parted), default=0)
        marks = [f"{secrets.randbelow(10**24):024}" for _ in range(TRIES)]
        self._mark = next((mark for mark in marks if not any(_meets(mark, text) for text in parted)), marks[0])
        self._parts = not any(_meets(self._mark, text) for text in parted)
        """Whether the mark parts control tokens; a tokenizer that is made for it can have them of digits alone."""
        self._copy: Tokenizer | None = None

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        stop: Event | None = None,
    ) -> Rendered:
        """Write a conversation through the chat template, in a process that is ended when it takes too long.

        Raises TemplateRefused with the template's error, and RenderingStopped soon after `stop` is set.
        """
        given = {"turns": list(turns), "tools": list(tools) or None, "variables": dict(variables or {})}
        marked: Any = given if self._allow_special else self._marked(given)
        try:
            own = self._tokenizer.get_chat_template(template, marked["tools"])
            context = self._tokenizer.apply_chat_template(
                marked["turns"],
                tools=marked["tools"],
                chat_template=CONTEXT,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (ValueError, LookupError) as error:  # no template of several is the default; no messages
            raise TemplateRefused(first_line(error)) from None
        try:
            names = {**self._tokenizer.special_tokens_map, **marked["variables"]}
            return Rendered(self._renderer.render(own, context, names, stop), is_marked=marked != given)
        except TemplateRefused as error:
            raise TemplateRefused(str(error).replace(self._mark, "")) from None

    def encode(self, rendered: Rendered, most: int | None = None) -> list[int]:
        """Encode what `render` has written. Raises UserError as `chat` does, and TooLongError as `raw` does."""
        self.require_short(rendered.text.replace(self._mark, ""), most)
        if rendered.is_marked:
            return self._encoded(rendered.text, add_special_tokens=False)
        return list(self._tokenizer(rendered.text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """End what `render` does; later calls raise RenderingStopped."""
        self._renderer.close()

    def text(self, text: str, most: int | None = None) -> list[int]:
        """Encode a user's text without a template. Raises UserError as `chat` does, and TooLongError as `raw` does."""
        self.require_short(text, most)
        marked = text if self._allow_special else self._marked(text)
        return self.raw(text) if marked == text else self._encoded(marked, add_special_tokens=True)

    def raw(self, text: str, most: int | None = None) -> list[int]:
        """Encode a prompt that its author has written as the model reads it: control tokens take effect.

        Raises TooLongError for one of far more than `most` tokens.
        """
        self.require_short(text, most)
        return list(self._tokenizer(text)["input_ids"])

    def require_short(self, value: Any, most: int | None) -> None:
        """Raise TooLongError if a text in a value has more than twice `most` tokens.

        A token takes a hundred bytes and more while a text is encoded, and a long text minutes. So its tokens are
        counted piece by piece, until there are too many. Where two pieces meet, a token may be parted: this counts
        some tokens too many, but never twice as many.
        """
        if isinstance(value, dict | list):
            for each in [*value, *value.values()] if isinstance(value, dict) else value:
                self.require_short(each, most)
        if most is None or not isinstance(value, str) or len(value) <= 2 * most:
            return
        tokens = 0
        for begin in range(0, len(value), PIECE):
            tokens += len(self._tokenizer(value[begin : begin + PIECE], add_special_tokens=False)["input_ids"])
            if tokens > 2 * most:
                raise TooLongError(f"prompt: it has more than {2 * most} tokens; shorten it")

    def _marked(self, value: Any) -> Any:
        """The value, in which no text spells a control token, neither alone nor together with a text after it."""
        if isinstance(value, dict):
            return {self._marked(key): self._marked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._marked(each) for each in value]
        if not isinstance(value, str):
            return value
        # What is left of a token may spell a shorter one.
        while found := self._spelled.search(value):
            if not self._parts:
                raise _cannot(found[0])
            value = self._spelled.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
        if self._normalizer and self._spelled.search(self._normalizer.normalize_str(value)):
            return value + self._mark
        ends = (value[-length:] for length in range(1, min(self._longest, len(value) + 1)))
        return value + self._mark if any(end in self._beginnings for end in ends) else value

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text with marks."""
        if self._copy is None:
            self._copy = self._copied()
        # Other threads run while a batch is encoded, and wait while a text is.
        [encoded] = self._copy.encode_batch([text], add_special_tokens=add_special_tokens)
        control = set(self.control.values())
        for token, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token in control and self._mark in text[begin:end]:
                raise _cannot(text[begin:end].replace(self._mark, ""))
        return list(encoded.ids)

    def _copied(self) -> Tokenizer:
        """A copy of the tokenizer that drops marks, after control tokens were found and before anything else."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _cannot("control tokens")
        parts = json.loads(backend.to_str())
        drop = {"type": "Replace", "pattern": {"String": self._mark}, "content": ""}
        own = [parts["normalizer"]] if parts["normalizer"] else []
        parts |= {"normalizer": {"type": "Sequence", "normalizers": [drop, *own]}, "truncation": None, "padding": None}
        for token in parts["added_tokens"]:
            # Tokens that are looked for in normalised text would be found in text without its marks.
            token["normalized"] = token["normalized"] and token["content"] not in self.control
        return Tokenizer.from_str(json.dumps(parts))


def any_of(texts: Iterable[str], deep: int = 0) -> str:
    """A pattern of any of some texts, the longest that fits; one that fits nothing without any.

    Alternatives are tried one by one at each place, and models have up to 1,000 control tokens. So texts that begin
    alike share their beginnings, up to `DEEPEST` times one in another.
    """
    alike: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        alike.setdefault(text if deep == DEEPEST else text[:1], []).append(text)
    parts = list[str]()
    for group in alike.values():
        first, last = min(group), max(group)
        shared = next(
            (place for place, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first)
        )
        begin = first[:shared]
        rests = [text[len(begin) :] for text in group]
        parts.append(re.escape(begin) + (any_of(rests, deep + 1) if any(rests) else ""))
    return f"(?:{'|'.join(parts)})" if parts else r"(?!)"


def _meets(mark: str, control: str) -> bool:
    """Whether a mark has a control token in it, or can make one together with what stands beside it."""
    parts = ((control[:place], control[place:]) for place in range(1, len(control)))
    return control in mark or any(mark.endswith(before) or mark.startswith(after) for before, after in parts)


def _cannot(what: str) -> UserError:
    return UserError(
        f"prompt: it spells {what}, which this model's tokenizer cannot encode as text; remove it, or use "
        "--allow-special"
    )
