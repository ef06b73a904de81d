"""Prompt files in JSON lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the user's turns, or a conversation to continue."""

    id: str
    turns: tuple[str, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    """Pairs (role, content). When given, `turns` is empty."""
    category: str | None = None
    domain: str | None = None


def read_prompts(path: Path, all_turns: bool = False) -> list[Prompt]:
    """Read all prompts of a JSON-lines file whose lines hold `prompt`, `messages` or Spec-Bench's `turns`.

    Only the first of `turns` is kept unless `all_turns`. Raises UserError naming the file and the line.
    """
    prompts = [_prompt(record, f"{path}:{number}", number, all_turns) for number, record in read_records(path)]
    if not prompts:
        raise UserError(f'{path}: holds no prompts; give one JSON object per line, e.g. {{"prompt": "Hello"}}')
    return prompts


def sample_prompts() -> list[Prompt]:
    """The prompts that come with the package, on some of which drafting pays and on some of which it cannot."""
    with resources.as_file(resources.files("ssd_profiles") / "sample_prompts.jsonl") as path:
        return read_prompts(path)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over (line number, object) of every line that is not blank. Raises UserError naming file and line."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a JSON-lines file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON in UTF-8 ({error}); give one JSON object per line") from None
        if not isinstance(record, dict):
            found = type(record).__name__
            raise UserError(f"{path}:{number}: expected a JSON object, got {found}; give one JSON object per line")
        if not is_text(json.dumps(record, ensure_ascii=False)):
            raise UserError(f"{path}:{number}: holds half of a character (a lone surrogate); cut the text elsewhere")
        yield number, record


def is_text(text: str) -> bool:
    """Whether `text` is valid Unicode. Lone surrogates stand for half a character or for undecodable bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prompt(record: dict[str, Any], where: str, number: int, all_turns: bool) -> Prompt:
    identity = str(record.get("id", record.get("question_id", number)))
    category = record.get("category")
    domain = record.get("domain")
    for name, value in (("category", category), ("domain", domain)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: {name} must be text, got {type(value).__name__}")
    if record.get("prompt") is not None and record.get("turns") is not None:
        raise UserError(f"{where}: has both `prompt` and `turns`; omit one of them")
    if "messages" in record:
        messages = _messages(record["messages"], where)
        return Prompt(identity, messages=messages, category=category, domain=domain)
    turns = record["turns"] if "turns" in record else [record.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        names = printable(", ".join(list(record)[:6])) or "no fields"
        raise UserError(
            f"{where}: needs `prompt` (text), `messages` or `turns` (a list of texts), "
            f"but has {names}; give one of the three"
        )
    turns = turns if all_turns else turns[:1]
    if not all(turn.strip() for turn in turns):
        raise UserError(f"{where}: the prompt is empty; remove the line or fill it")
    return Prompt(identity, turns=tuple(turns), category=category, domain=domain)


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    valid = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
    if not valid or not value:
        raise UserError(f"{where}: `messages` must be a list of objects with text `role` and `content`")
    if not value[-1]["content"].strip():
        raise UserError(f"{where}: the last message is empty; remove the line or fill it")
    return tuple((message["role"], message["content"]) for message in value)
