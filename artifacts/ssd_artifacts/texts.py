"""Reading and writing a bundle's text files. Whoever wrote them is not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ssd_profiles.errors import UserError, first_problem

MAX_TEXT_BYTES = 4 << 20
"""Reading so much YAML takes seconds; the largest domain that a compile writes is a sixth of it."""
MAX_YAML_DEPTH = 32
MAX_SCALAR = 2048
"""Characters of one YAML value. Longer numbers take quadratic time to read, or cannot be printed."""

M = TypeVar("M", bound=BaseModel)

# libyaml's parser, where PyYAML was built with it: ten times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """The text of a file. Raises UserError when it is too large, is not UTF-8 or cannot be read."""
    # A link may lead to a device, which has no end.
    if not path.is_file():
        raise UserError(f"{path}: cannot be read (no such file); is this a bundle?")
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(f"{path}: larger than any such file of a bundle; compile the bundle again")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this a bundle?") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text in UTF-8 ({error.reason}); compile the bundle again") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises UserError when it is not valid, or not of the plain kind that bundles hold."""
    text = read_text(path)
    try:
        _check_structure(text)
        return yaml.load(text, Loader=_StrictLoader)
    # ValueError and OverflowError: what the loader makes of a date or a number that cannot be one.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not valid YAML ({line}); compile the bundle again") from None


def validated(path: Path, data: Any, kind: type[M]) -> M:
    """The `data` of the file `path` as a `kind`. Raises UserError naming the first place that does not fit."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}; compile the bundle again") from None


def to_yaml(model: BaseModel) -> str:
    """The YAML of `model`, its fields in their order."""
    return yaml.dump(model.model_dump(mode="json"), Dumper=_FlowListDumper, sort_keys=False, width=110)


def _check_structure(text: str) -> None:
    """Raise YAMLError on what plain data has no need of and a reader may choke on.

    Aliases let a small file unfold into a huge one. Depth overflows the stack of a parser in C.
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
    """Safe YAML that repeats no key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key stands twice among {sorted(keys)[:5]}")
        return super().construct_mapping(node, deep)


class _FlowListDumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        numbers = all(isinstance(item, (int, float)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=numbers)


_FlowListDumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data))
