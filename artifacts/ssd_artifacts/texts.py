"""Reads and writes the text files of a bundle. Bundles may come from anybody, so nothing in them is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ssd_profiles.errors import UserError, first_problem

MAX_TEXT_BYTES = 4 << 20
"""Reading this much YAML takes seconds; the largest domain file of a compile is a sixth of it."""
MAX_YAML_DEPTH = 32
MAX_SCALAR = 2048
"""Most characters of one YAML value. Longer numbers take quadratic time to parse or cannot be printed."""

_REMEDY = "give the folder of a bundle that ssd-compile or ssd-bundle wrote"

M = TypeVar("M", bound=BaseModel)

# The C parser is ten times as fast, but PyYAML may have been built without it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """Read a text file. Raises UserError when it is missing, too large or not UTF-8."""
    # A link may lead to a device, and reading a device may never end.
    if not path.is_file():
        raise UserError(f"{path}: cannot be read (no such file); {_REMEDY}")
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(f"{path}: expected at most {MAX_TEXT_BYTES >> 20} MiB of text; compile the bundle again")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text in UTF-8 ({error.reason}); compile the bundle again") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises UserError when it is invalid or uses anything beyond plain data."""
    text = read_text(path)
    try:
        _check_structure(text)
        return yaml.load(text, Loader=_StrictLoader)
    # The loader raises ValueError or OverflowError for impossible dates and numbers.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not valid YAML ({line}); compile the bundle again") from None


def validated(path: Path, data: Any, kind: type[M]) -> M:
    """Parse the `data` of the file `path` as a `kind`; `true` is no number, and 2.0 no whole one.

    Raises UserError naming the first field that does not fit.
    """
    try:
        # Only for JSON do strict models take lists for tuples.
        return kind.model_validate_json(json.dumps(data), strict=True)
    except TypeError:
        raise UserError(f"{path}: holds a date, or a key that is no text; compile the bundle again") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}; compile the bundle again") from None


def to_yaml(model: BaseModel) -> str:
    """Serialise `model` as YAML, with its fields in order."""
    return yaml.dump(model.model_dump(mode="json"), Dumper=_FlowListDumper, sort_keys=False, width=110)


def _check_structure(text: str) -> None:
    """Raise YAMLError on aliases, tags, long values and deep nesting, which plain data does not need.

    Aliases let a small file expand into a huge one, and deep nesting overflows the C parser's stack.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError("tags are not allowed")
        if isinstance(event, yaml.events.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise yaml.YAMLError(f"a value is longer than {MAX_SCALAR} characters")
        depth += isinstance(event, yaml.events.CollectionStartEvent)
        depth -= isinstance(event, yaml.events.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_YAML_DEPTH}")


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """Safe YAML loader that rejects repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key stands twice among {sorted(keys)[:5]}")
        return super().construct_mapping(node, deep)


class _FlowListDumper(yaml.SafeDumper):
    """Dumper that writes lists of numbers on one line and everything else in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        numbers = all(isinstance(item, (int, float)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=numbers)
