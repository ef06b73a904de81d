"""Log-probabilities in the shapes of OpenAI's interface."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_runtime.serving.http.logits import TokenLogprobs
from ssd_runtime.serving.http.openai.answers.events import Json
from ssd_runtime.serving.http.token_bytes import TokenBytes

UTF8 = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """A token that an answer has, or could have had, at one position."""

    name: str
    """Its text where that is whole characters; no two candidates of a position share a name."""
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """One token of an answer with the most probable ones in its place."""

    chosen: TokenCandidate
    top: list[TokenCandidate]
    offset: int
    """Place in the answer's text of the character that it is part of."""


class PositionReader:
    """Reads the log-probabilities of one answer, in order."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._first = True
        """Whether no token had text so far."""
        self._characters = UTF8("replace")
        self._offset = 0

    def skip(self, tokens: Sequence[int]) -> None:
        """Go on after tokens whose log-probabilities are not read."""
        for token in tokens:
            self._offset += len(self._characters.decode(self._tokens.of(token, self._first)))
            self._first = self._first and not self._tokens.has_text(token)

    def read(self, entries: Sequence[TokenLogprobs]) -> list[Position]:
        """The positions of the answer's next tokens."""
        return [self._next(entry) for entry in entries]

    def _next(self, entry: TokenLogprobs) -> Position:
        candidates = dict[int, TokenCandidate]()
        names = set[str]()
        for token, logprob in [(entry.token, entry.logprob), *entry.top]:
            if token not in candidates:
                data = self._tokens.of(token, self._first)
                name = self._name(token, data)
                candidates[token] = TokenCandidate(f"token_id:{token}" if name in names else name, logprob, data)
                names.add(name)
        chosen = candidates[entry.token]
        position = Position(
            chosen=chosen,
            top=[candidates[token] for token, _ in entry.top],
            offset=self._offset + self._breaks_off(chosen.bytes),
        )
        self.skip([entry.token])
        return position

    def _breaks_off(self, data: bytes) -> bool:
        """Whether the bytes before `data` are the beginning of a character that `data` does not continue."""
        begun, _ = self._characters.getstate()
        try:
            UTF8("strict").decode(begun + data[:1])
        except UnicodeDecodeError:
            return bool(begun)
        return False

    def _name(self, token: int, data: bytes) -> str:
        """The text of a token, or its id if its bytes are part of a character."""
        try:
            return data.decode() or self._tokens.name(token)
        except UnicodeDecodeError:
            return f"token_id:{token}"


def chat_logprobs(positions: Sequence[Position]) -> Json:
    """The `logprobs` of a chat's choice."""
    content = [{**_entry(each.chosen), "top_logprobs": [_entry(one) for one in each.top]} for each in positions]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Sequence[Position]) -> Json:
    """The `logprobs` of a completion's choice; `top_logprobs` holds the token itself, too, as OpenAI's does."""
    return {
        "tokens": [each.chosen.name for each in positions],
        "token_logprobs": [each.chosen.logprob for each in positions],
        "top_logprobs": [{one.name: one.logprob for one in [*each.top, each.chosen]} for each in positions],
        "text_offset": [each.offset for each in positions],
    }


def _entry(candidate: TokenCandidate) -> Json:
    return {"token": candidate.name, "logprob": candidate.logprob, "bytes": list(candidate.bytes)}
