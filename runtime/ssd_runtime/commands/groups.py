"""Groups of options: a command's parameter of a dataclass stands for one option per field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a flat signature, as Typer reads it; it calls `command` with the groups filled in.

    A field's annotation is that of the option, and its default, which every field has, is the option's. A group's
    `PANEL` is the panel of its options that name none.
    """
    given = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in given if is_dataclass(hints[name])}
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in given.items():
        if name not in groups:
            flat[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            assert field.name not in flat, f"{field.name} is an option of two groups"
            flat[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=_in_panel(types[field.name], groups[name].PANEL),
            )

    @wraps(command)
    def flattened(**values: Any) -> None:
        filled = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **filled)

    shown: Any = flattened
    del shown.__wrapped__  # else its own signature would be read
    shown.__signature__ = inspect.Signature(list(flat.values()))
    shown.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return flattened


def _in_panel(annotation: Any, panel: str) -> Any:
    kind, *about = get_args(annotation)
    for place, each in enumerate(about):
        if isinstance(each, OptionInfo) and each.rich_help_panel is None:
            about[place] = copy(each)  # options are shared by groups
            about[place].rich_help_panel = panel
    return Annotated[kind, *about]
