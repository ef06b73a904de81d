"""Templates that loop, grow, fail or reach for what is not theirs: each is refused in one line, in bounded time."""

from __future__ import annotations

import gc
import os
import time
from threading import Event, Thread

import pytest

from ssd_runtime.templates.renderer import RenderingStopped, TemplateLimits, TemplateRefused, TemplateRenderer
from tests.serving import ENDLESS

SECONDS = 1.0
LIMITS = TemplateLimits(seconds=SECONDS, memory_bytes=256 << 20, characters=1 << 20)
CONTEXT = '{"messages": [{"role": "user", "content": "hi"}], "tools": null}'
TIME, SIZE, MEMORY = (
    "more than 1 s|too much time or memory",
    "writes more than 1048576",
    "too much memory|too much time or memory",
)
REFUSED = {
    ENDLESS: TIME,
    "{% set ns = namespace(n=0) %}" + ENDLESS.replace("{% e", "{% set ns.n = ns.n + a %}{% e", 1): TIME,
    "{{ (10 ** 4000) ** 100000 }}": TIME,
    "{{ 7 ** 9999999 ** 3 }}": TIME,
    "{% set x = '9' * 30000000 %}{{ x | wordwrap(1) | length }}": f"{TIME}|{MEMORY}",
    "{{ ('a' * 30000) | replace('a', 'b' * 30000) }}": f"{MEMORY}|{SIZE}",
    "{{ range(99999) | map('string') | list | sort | join(',') | length }}" + ENDLESS: TIME,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "nests too deeply",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}": "nests too deeply",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}": "nests too deeply",
    "{{ 'x' * 10 ** 10 }}": MEMORY,
    "{{ [0] * 10 ** 9 }}": MEMORY,
    "{% set x = 'x' * 2 ** 20 %}{{ x }}{{ x }}": SIZE,
    "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}": SIZE,
    "{{ 'x'.center(10 ** 10) }}": MEMORY,
    "{{ '%1000000000d' | format(1) }}": MEMORY,
    "{{ range(10 ** 9) | length }}": "OverflowError: Range too big",
    "{{ lipsum(n=99999) }}": f"{SIZE}|{TIME}|{MEMORY}",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 10 ** 5000 }}": "ValueError: Exceeds the limit",
    "{{ raise_exception(10 ** 5000) }}": "Exceeds the limit",
    "{{ raise_exception('no\n\x1b[2Jway') }}": "^no .*way$",
    "{{ raise_exception() }}": "TypeError",
    "{{ raise_exception('x' * 99999) }}": "x{200}$",
    "{{ missing.field }}": "'missing' is undefined",
    "{{ messages[5].content }}": "no element 5|undefined",
    "{{ messages[0].content.no() }}": "no attribute 'no'",
    "{{ messages + 1 }}": "TypeError",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[0].update(a=1) }}": "unsafe",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe|undefined",
    "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}": "unsafe|undefined",
    "{{ lipsum.__globals__['os'].system('true') }}": "unsafe|undefined",
    "{{ cycler.__init__.__globals__.os.environ }}": "unsafe|undefined",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "unsafe",
    "{{ (messages | map(attribute='__class__') | first).__mro__ }}": "unsafe|undefined",
    "{% set ns = namespace(__class__=1) %}": "underscore",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "underscore",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__.sys.exit() }}": "unsafe|undefined",
    "{{ strftime_now(5) }}": "TypeError",
    "{{ strftime_now | tojson }}": "TypeError: Object of type",
    "{% include '/etc/passwd' %}": "no loader",
    "{% extends 'x' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% for m in messages %}": "line 1: .*endfor",
    "{{": "line 1: unexpected",
    "{% nonsense %}": "unknown tag 'nonsense'",
    "{% generation %}": "line 1: .*endgeneration",
    "{{ '" + "(" * 3000 + "' ~ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "nests too deeply",
    "{% if a %}" * 300 + "x" + "{% endif %}" * 300: "SyntaxError|IndentationError|nests too deeply",
    "{{ messages | nofilter }}": "No filter named 'nofilter'",
    "{{ messages is notest }}": "No test named 'notest'",
}


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(LIMITS)


@pytest.mark.parametrize("template", REFUSED, ids=[f"{number}" for number in range(len(REFUSED))])
def test_a_hostile_template_is_refused_and_the_next_one_is_not(renderer: TemplateRenderer, template: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match=REFUSED[template]) as refused:
        renderer.render(template, CONTEXT)
    assert time.monotonic() - began < SECONDS + 20
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) <= 300
    assert renderer.render("{{ messages[0].content }}", CONTEXT) == "hi"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00\x1b[2J", "\u202e\u2028\n", "{{ 1/0 }}", "\U0010ffff" * 9])
def test_any_text_comes_back_as_it_is(renderer: TemplateRenderer, text: str) -> None:
    assert renderer.render("{{ text }}" + "é😀", CONTEXT, {"text": text}) == f"{text}é😀"


def test_memory_of_one_conversation_is_not_the_next_ones(renderer: TemplateRenderer) -> None:
    for number in range(3):
        text = (
            "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ seen | default('') }}{% set seen = 1 %}"
        )
        assert renderer.render(text, CONTEXT) == "1", number


def test_a_call_that_nobody_waits_for_ends_and_frees_its_process() -> None:
    renderer = TemplateRenderer(TemplateLimits(seconds=600))
    stop = Event()
    ended = list[type[BaseException]]()

    def call() -> None:
        try:
            renderer.render(ENDLESS, CONTEXT, stop=stop)
        except RenderingStopped as error:
            ended.append(type(error))

    thread = Thread(target=call)
    thread.start()
    process = _process(renderer)
    assert thread.is_alive()
    stop.set()
    thread.join(60)
    assert ended == [RenderingStopped]
    assert not _is_running(process)
    assert renderer.render("x", CONTEXT) == "x"
    renderer.close()
    with pytest.raises(RenderingStopped):
        renderer.render("x", CONTEXT)


def test_closing_ends_calls_and_no_process_outlives_its_renderer() -> None:
    renderer = TemplateRenderer(TemplateLimits(seconds=600))
    ended = list[str]()

    def call() -> None:
        try:
            renderer.render(ENDLESS, CONTEXT)
        except RenderingStopped:
            ended.append("stopped")

    threads = [Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    process = _process(renderer, 3)
    renderer.close()
    for thread in threads:
        thread.join(60)
    assert ended == ["stopped"] * 3
    assert not _is_running(process)
    other = TemplateRenderer()
    other.render("x", CONTEXT)
    process = _process(other)
    del other
    gc.collect()
    assert not _is_running(process)


def test_an_orphan_ends_by_itself() -> None:
    """Its parent may be killed while it loops."""
    renderer = TemplateRenderer(TemplateLimits(seconds=0.2))
    child = renderer._take()
    child.wait_until_ready(None)
    child._socket.sendall(f'[["{ENDLESS}", {{}}, 9, 0.2], {{}}]\n'.encode())
    assert child._process.wait(60) < 0


def _process(renderer: TemplateRenderer, count: int = 1) -> int:
    """The id of a process, once there are so many that are ready."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ready = [each._process.pid for each in list(renderer._all) if each._ready]
        if len(ready) == count:
            return ready[0]
        time.sleep(0.01)
    raise AssertionError("no process is ready")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
