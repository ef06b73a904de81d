"""Bodies of requests that are made to cost a server time or memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
SPARE = 512
"""Bytes of a body around what fills it."""

ITEMS = [
    *("1", "0", "-1", "7.5", "1e400", "12345678", "4294967296", "true", "null", '""', '"a"', '"abcdefgh"', "[]", "{}"),
    *("[1]", '["a"]', "[[]]", "[[1],[]]", '{"a":1}', '{"type":"text","text":"a"}', '{"role":"user","content":"x"}'),
    *(json.dumps(CALL), json.dumps(TOOL), '{"role":"assistant","tool_calls":[{},{},{}]}', '{"a":{"b":[{"c":[]}]}}'),
]
"""Items that lists are filled with."""
TEXTS = [
    *("a", "a ", " ", "\n", "ab,", "<s>", "</s>", "\u00e9", "\u4e00", "\U0001f600", "\\", '"', "\x00", "<|im_start|>"),
    *("aaaaaaaaaaaaaaab", "The river rose over night. ", "0123456789", "{}[],:", "\u0301", "[1,1,1],", "<s", "\ufffd"),
]
"""Texts that texts are filled with."""


def filled(item: str, size: int) -> str:
    """Copies of an item with commas between them, of `size` characters or one item."""
    return ",".join([item] * max(1, size // (len(item) + 1)))


def listed(random: Random, size: int) -> str:
    """A list of many items of one kind, the first or the last of which may be another one."""
    item = random.choice(ITEMS)
    odd = random.choice([None, None, *ITEMS])
    parts = [odd] * (odd is not None) + [filled(item, size)]
    return f"[{','.join(parts if random.random() < 0.5 else parts[::-1])}]"


def text(random: Random, size: int) -> str:
    """A long text, with characters escaped or not."""
    piece = random.choice(TEXTS)
    odd = random.choice(["", "", "\U0001f600"])
    escape = random.random() < 0.3
    length = len(json.dumps(piece, ensure_ascii=escape).encode()) - 2
    return json.dumps(piece * max(1, size // length) + odd, ensure_ascii=escape)


def mapped(random: Random, size: int) -> str:
    """An object of many names."""
    item = random.choice(ITEMS)
    name = random.choice(["", "a", "content", "role", "type", "n" * 900])
    repeated = name and random.random() < 0.3
    count = max(1, size // (len(name) + len(item) + (4 if repeated else 11)))
    return "{" + ",".join(f'"{name}{"" if repeated else place}":{item}' for place in range(count)) + "}"


def nested(random: Random, size: int) -> str:
    """Lists or objects within each other, closed or not."""
    depth = random.choice([100, 190, 900, 5000, size // 8])
    begin, end = random.choice([("[", "]"), ('{"a":', "}"), ("[[],", "]")])
    return begin * depth + "1" + end * (depth if random.random() < 0.8 else 0)


def written(random: Random, size: int) -> str:
    """JSON as text, as calls have their arguments."""
    return json.dumps(random.choice([listed, mapped, nested])(random, size // 2))


def number(random: Random, size: int) -> str:
    """A number of many digits."""
    return random.choice(["9" * size, "0." + "1" * size, "1e" + "9" * size, "-" + "8" * 4000])


def name(random: Random, size: int) -> str:
    """An object whose one name is long."""
    return "{" + text(random, size) + ":1}"


VALUES: list[Callable[[Random, int], str]] = [listed, listed, text, mapped, nested, written, number, name]
PLACES: list[tuple[str, str]] = [
    *(
        (COMPLETIONS, f'{{"max_tokens":1,"prompt":{each}}}')
        for each in ["%s", "%s", "%s", "[%s]", '["a",%s]', "[[1],%s]"]
    ),
    *((COMPLETIONS, f'{{"max_tokens":1,"n":16,"prompt":{each}}}') for each in ["%s", "[[5],[5],%s]"]),
    *(
        (CHAT, f'{{"max_tokens":1,"messages":{each}}}')
        for each in [
            "%s",
            "[%s]",
            '[{"role":"user","content":%s}]',
            '[{"role":"user","content":[%s]}]',
            '[{"role":"user","content":[{"type":"text","text":%s}]}]',
            '[{"role":"user","content":"x","nonsense":%s}]',
            '[{"role":%s,"content":"x"}]',
            '[{"role":"user","content":"x"},{"role":"assistant","content":"x","reasoning_content":%s}]',
            '[{"role":"assistant","tool_calls":%s}]',
            '[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}]',
            '[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{}","parsed_arguments":%s}}]}]',
            '[{"role":"assistant","content":"x","annotations":%s,"parsed":1}]',
            '[{"role":"assistant","content":"x","parsed":%s}]',
            '[{"role":"user","content":"x","name":%s}]',
        ]
    ),
    *(
        (CHAT, f'{{"max_tokens":1,"messages":[{{"role":"user","content":"x"}}],{each}}}')
        for each in [
            '"stop":%s',
            '"logit_bias":%s',
            '"tools":%s',
            '"tools":[{"type":"function","function":{"name":"f","description":%s}}]',
            '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]',
            '"tool_choice":%s',
            '"ssd":%s',
            '"ssd":{"parameters":%s}',
            '"chat_template_kwargs":%s',
            '"chat_template_kwargs":{"x":%s}',
            '"metadata":%s',
            '"model":%s',
            '"response_format":%s',
            '"stream_options":%s',
            '"seed":%s',
            '"temperature":%s',
            '"functions":%s',
            '"nonsense":%s',
        ]
    ),
    (CHAT, "%s"),
    (COMPLETIONS, "%s"),
    (CHAT, ' %s {"messages":[]}'),
]
"""Where in a body the hostile value stands, with the path that it is sent to."""


def hostile_bodies(count: int, size: int = 4 << 20) -> Iterator[tuple[str, str, bytes]]:
    """So many different bodies of at most `size` bytes: a title, the path and the body. Always the same ones."""
    return islice(_all(size), count)


def _all(size: int) -> Iterator[tuple[str, str, bytes]]:
    yield "the issue's", COMPLETIONS, b'{"prompt":["a",' + filled("1", size - SPARE).encode() + b"]}"
    yield "white space", CHAT, b" " * size
    yield "no UTF-8", CHAT, b'{"messages":"' + b"\xff" * (size - SPARE) + b'"}'
    yield "a text without end", CHAT, b'{"messages":"' + b"a\\\\" * ((size - SPARE) // 3)
    random = Random(0)
    for number in range(1 << 20):
        path, place = PLACES[number % len(PLACES)]
        make = random.choice(VALUES)
        # The bounds of a server are somewhere between the smallest and the largest.
        share = 1.0 if random.random() < 0.4 else random.random()
        whole = place.replace("%s", make(random, int(2000 * (size / 2000) ** share) - SPARE))
        body = whole.encode()
        if len(body) <= size:
            yield f"{make.__name__} in {place}", path, body
