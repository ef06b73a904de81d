"""Renders chat templates in a process of its own, as transformers does; it imports nothing of this package.

Standard input has a JSON line per conversation: `[[template, variables, characters, seconds], context]`. Standard
output has a JSON line for each: `{"text": …}` or `{"refused": …}`, the reason. The first line, `{}`, says that the
process is ready.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SPARE_SECONDS = 2
"""Seconds of work after which the system ends this process, beyond those after which its parent does."""
MOST_REASON = 200
"""Most characters of a reason."""


class GenerationTag(Extension):
    """The tag `{% generation %} … {% endgeneration %}` around answers, which only training looks for."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the tag into a call with its body, so that variables which are set inside stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class Names(Namespace):
    """A namespace without names that begin with an underscore, through which Python's internals could be reached."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")
        super().__setitem__(name, value)


class Dict:
    """`dict` without the methods of the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """`dict(…)`."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


def namespace(*args: Any, **kwargs: Any) -> Names:
    """A namespace with these names."""
    made = Names()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def raise_exception(message: Any) -> None:
    """Refuse the conversation."""
    raise TemplateError(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML's escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    """The present time."""
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def compiled(text: str) -> Template:
    """The template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=namespace, dict=Dict()
    )
    return environment.from_string(text)


class TextTooLongError(Exception):
    """A text is longer than allowed."""


def joined(parts: Iterable[str], most: int) -> str:
    """The text of all parts. Raises TextTooLongError if it has more than `most` characters."""
    kept = list[str]()
    length = 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > most:
            raise TextTooLongError(f"it writes more than {most} characters")
    return "".join(kept)


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    try:
        text = " ".join(str(error).split())
    except Exception:  # the template chose what to raise, and that may have no text
        text = ""
    if isinstance(error, TemplateSyntaxError):
        text = f"line {error.lineno}: {text}"
    named = isinstance(error, TemplateError | TextTooLongError) and text
    return (text if named else f"{type(error).__name__}: {text}").removesuffix(": ")[:MOST_REASON]


def answer(line: str) -> dict[str, str]:
    """Render the template of one line."""
    try:
        (template, variables, most, seconds), context = json.loads(line)
        limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + SPARE_SECONDS)
        return {"text": joined(compiled(template).generate({**variables, **context}), most)}
    except Exception as error:  # whatever a template raises is a reason to refuse the conversation
        return {"refused": reason(error)}


def limit(kind: int, most: int) -> None:
    """Lower or raise a limit of this process, within the system's own."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(memory_bytes: int) -> None:
    """Answer lines until there are no more. An orphan ends, too: its input does, and its seconds do."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, memory_bytes)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
