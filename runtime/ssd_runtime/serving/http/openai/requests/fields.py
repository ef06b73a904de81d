"""Fields of requests that have no effect here: those that may be ignored, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssd_runtime.serving.http.openai.errors import invalid

IGNORED_SAFELY: Mapping[str, str] = {
    "user": "names the end user for OpenAI's abuse monitoring; answers do not depend on it",
    "safety_identifier": "names the end user for OpenAI's abuse monitoring; answers do not depend on it",
    "metadata": "labels a stored completion; nothing is stored here",
    "store": "asks OpenAI to keep the completion for its own tools; nothing is stored here",
    "service_tier": "chooses among OpenAI's prices; there is one tier here",
    "prompt_cache_key": "helps OpenAI to find a cached prefix; prefixes are found by their tokens here",
    "prompt_cache_retention": "says how long OpenAI keeps a prefix; it changes speed alone",
    "prompt_cache_options": "says what OpenAI keeps of a prefix; it changes speed alone",
    "prediction": "is a guess at the answer that only makes decoding faster",
}
"""Fields that change no answer, with the reasons; any value is accepted."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is refused unless it asks for what happens anyway."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that ask for what happens anyway; null is always one."""


EFFORT = "reasoning_effort"
"""The field of requests, and the variable of templates, that says how much to think."""
UNSUPPORTED: Mapping[str, Unsupported] = {
    "echo": Unsupported("the prompt is not repeated in the answer; omit it", (False,)),
    "suffix": Unsupported("the model only writes on after the prompt; omit it", ("",)),
    "best_of": Unsupported("candidates are not ranked; use `n` to get several answers", (1,)),
    "functions": Unsupported("it was replaced by `tools`; use that", ([],)),
    "function_call": Unsupported("it was replaced by `tool_choice`; use that", ("none", "auto")),
    "modalities": Unsupported("answers are text; omit it", (["text"],)),
    "audio": Unsupported("answers are text; omit it"),
    "verbosity": Unsupported("the model has no such setting; omit it", ("medium",)),
    "web_search_options": Unsupported("the server reads nothing from the web; omit it"),
    "moderation": Unsupported("answers are not moderated; omit it"),
    "use_beam_search": Unsupported("beam search is not built; omit it", (False,)),
    "ignore_eos": Unsupported("answers end at the model's end token; omit it", (False,)),
    "min_tokens": Unsupported("answers end at the model's end token; omit it", (0,)),
    "stop_token_ids": Unsupported("answers end at strings; use `stop`", ([],)),
    "include_stop_str_in_output": Unsupported("answers end before the string; omit it", (False,)),
    "skip_special_tokens": Unsupported("special tokens have no text in answers; omit it", (True,)),
    "add_generation_prompt": Unsupported("the template always begins the answer; omit it", (True,)),
    "continue_final_message": Unsupported("the last message is never continued; omit it", (False,)),
    "guided_json": Unsupported("it was replaced by `structured_outputs`; use that"),
    "guided_regex": Unsupported("it was replaced by `structured_outputs`; use that"),
    "guided_choice": Unsupported("it was replaced by `structured_outputs`; use that"),
    "guided_grammar": Unsupported("it was replaced by `structured_outputs`; use that"),
}
"""Fields of real clients that cannot be honoured, with what to do instead."""


def without_effect_removed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without fields that have no effect. Raises ApiError for a field that cannot be honoured."""
    kept = dict[str, Any]()
    for name, value in body.items():
        if name in IGNORED_SAFELY or value is None:
            continue
        unsupported = UNSUPPORTED.get(name)
        if unsupported is None:
            kept[name] = value
        elif not _is_among(value, unsupported.harmless):
            raise invalid(name, unsupported.why, "unsupported_parameter")
    return kept


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a value is one of those; false and 0 are different values in JSON, 0 and 0.0 are not."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in harmless)
