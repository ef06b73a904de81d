"""What a template writes is what transformers' `apply_chat_template` writes."""

from __future__ import annotations

from typing import Any

import pytest

from ssd_runtime.loading.prompt_tokens import PromptTokens
from tests.toy_tokenizers import CHATML, byte_level

TOKENIZER = byte_level()
PROMPTS = PromptTokens(TOKENIZER, allow_special=True)
TEMPLATES = {
    "chatml": CHATML,
    "brackets": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}\n"
        "{%- for m in rest %}{% if loop.index0 == 0 and system is not none %}"
        "{% set text = '<<SYS>>\\n' + system + '\\n<</SYS>>' + m['content'] %}{% else %}"
        "{% set text = m['content'] %}{% endif %}{{ bos_token + '[INST] ' ~ text | trim ~ ' [/INST]' "
        "if m['role'] != 'assistant' else text + eos_token }}"
        "{% endfor %}"
    ),
    "tools": (
        "{%- if tools %}\n    {{- '<tools>' }}\n    {%- for tool in tools %}\n"
        "        {{- '\\n' ~ (tool | tojson) ~ (tool.function | tojson(indent=4, sort_keys=true)) }}"
        "\n    {%- endfor %}\n"
        "{%- endif %}\n{% for m in messages %}\n  {% if m.tool_calls is defined and m.tool_calls %}\n"
        "    {% for call in m.tool_calls %}{{ call.function.name }}: "
        "{{ call.function.arguments | tojson(ensure_ascii=true) }}"
        "{% endfor %}\n  {% endif %}\n{{ m.role }}: {{ m.content | default('', true) }}"
        "{% if m.name %} ({{ m.name }}){% endif %}\n"
        "{% endfor %}"
    ),
    "thoughts": (
        "{% set ns = namespace(last=-1, found=false) %}{% for m in messages | reverse %}"
        "{% if not ns.found and m.role == 'user' %}{% set ns.found = true %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ m.role }}{% if m.reasoning_content and loop.index0 > ns.last %}"
        "<think>{{ m.reasoning_content.strip('\\n') }}</think>{% endif %}{{ m.thinking }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>{% endif %}"
    ),
    "training": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}</s>"
        "{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    ),
    "loops": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}   {# unseen #}\n  {% set parts = m.content.split(' ') %}\n{{ parts[::-1] | join('_') | upper }}\n"
        "{% endfor %}{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['k'], 3) }}{{ range(3) | list }}"
    ),
    "macros": (
        "{% macro show(m, depth=0) %}{{ '  ' * depth }}<{{ m.role | e }}>{{ m.content | safe }}{{ caller() if caller }}"
        "{% endmacro %}{% for m in messages %}{% call show(m, loop.index) %}!{% endcall %}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ documents }}{{ tools is none }}{{ unk_token }}{{ missing }}{{ mood }}"
    ),
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Why is <b> the sky & sea 'blue'?  \n"}],
    "long": [
        {"role": "system", "content": "Be brief. 日本語 😀 \u2028"},
        {"role": "user", "content": " a b  c\n", "name": "Ada"},
        {"role": "assistant", "content": "{{ 1/0 }} {% if %}", "reasoning_content": "\nhm\n"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "x", "reasoning_content": "so"},
    ],
    "calls": [
        {"role": "user", "content": "17 °C?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"b": [1, 2.50, None, True], "a": {"é": "</"}}},
                }
            ],
        },
        {"role": "tool", "content": '{"t": 1e99}', "tool_call_id": "call_1"},
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "b": 1, "a": {}}},
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_text_and_tokens_are_those_of_transformers(template: str, conversation: str) -> None:
    turns, text = CONVERSATIONS[conversation], TEMPLATES[template]
    for tools in ([], [TOOL], [TOOL, {**TOOL, "x": 1}]):
        for variables in ({}, {"enable_thinking": False, "mood": [1, {"a": None}], "eos_token": "<end>"}):
            given = {"chat_template": text, "tools": tools or None, "add_generation_prompt": True, **variables}
            expected = TOKENIZER.apply_chat_template(turns, tokenize=False, **given)
            assert PROMPTS.render(turns, text, tools, variables).text == expected
            ids = list(TOKENIZER.apply_chat_template(turns, **given)["input_ids"])
            assert PROMPTS.encode(PROMPTS.render(turns, text, tools, variables)) == ids


def test_one_of_several_templates_is_chosen_as_transformers_does() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    prompts, turns = PromptTokens(tokenizer), CONVERSATIONS["one"]
    for tools in ([], [TOOL]):
        expected = tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False)
        assert prompts.render(turns, tools=tools).text == expected
    assert prompts.render(turns, "tool_use").text == "with tools"
