"""Log-probabilities in the shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ssd_runtime.engine.sequence.text_stream import UNFINISHED
from ssd_runtime.serving.http.logits import TokenLogprobs

Decode = Callable[[int], str]
"""The text of a token alone."""
Json = dict[str, Any]


def chat_logprobs(entries: Sequence[TokenLogprobs], decode: Decode) -> Json:
    """The `logprobs` of a chat's choice."""
    content = [
        {
            **_entry(each.token, each.logprob, decode),
            "top_logprobs": [_entry(token, value, decode) for token, value in each.top],
        }
        for each in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprobs], decode: Decode, offset: int) -> Json:
    """The `logprobs` of a completion's choice, whose text begins `offset` characters after the answer's."""
    texts = [decode(each.token) for each in entries]
    offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
    return {
        "tokens": [_name(each.token, decode) for each in entries],
        "token_logprobs": [each.logprob for each in entries],
        "top_logprobs": [{_name(token, decode): value for token, value in each.top} for each in entries],
        "text_offset": offsets,
    }


def _name(token: int, decode: Decode) -> str:
    """The text of a token, or its id where the text is half a character, which several tokens share."""
    text = decode(token)
    return f"token_id:{token}" if UNFINISHED in text else text


def _entry(token: int, logprob: float, decode: Decode) -> Json:
    text = decode(token)
    # Half a character has no text of its own, so its bytes are unknown here.
    return {"token": text, "logprob": logprob, "bytes": None if UNFINISHED in text else list(text.encode())}
