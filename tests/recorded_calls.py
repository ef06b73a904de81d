"""What chat templates of models write for the conversations of the probe.

`python -m tests.recorded_calls FOLDER` records them from the `*.jinja` files of a folder, such as `models/templates` in
llama.cpp's source package. Only what follows the question is kept.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ssd_runtime.loading.prompt_tokens import PromptTokens
from ssd_runtime.serving.http.openai.calls.probe import TOOL, conversation, shared
from ssd_runtime.templates.renderer import TemplateRefused
from tests.toy_tokenizers import byte_level

FILE = Path(__file__).parent / "runtime/serving/recorded_calls.json"
CONTROL = re.compile(r"<\|[^|<>]+\|>|<｜[^｜]+｜>|\[[A-Z_]+\]|</?s>")
"""Texts that are control tokens of these models."""


def record(folder: Path) -> None:
    prompts = PromptTokens(byte_level(), allow_special=True)
    found = dict[str, list[str]]()
    for path in sorted(folder.glob("*.jinja")):
        texts = list[str]()
        for calls in range(3):
            try:
                texts.append(prompts.render(conversation(calls), path.read_text(), [TOOL]).text)
            except TemplateRefused:
                texts.append("")
        written = [text for text in texts if text]
        if len(written) > 1 and "probe_tool" in texts[1]:
            begin = min(shared(written[0], text) for text in written)
            # A control token that all begin with stays whole.
            for token in CONTROL.finditer(texts[1]):
                begin = token.start() if token.start() < begin < token.end() else begin
            found[path.stem] = [text and text[begin:] for text in texts]
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
