"""`ssd-run` at a terminal, behind a pipe, and what it records."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_profiles.prompts import read_prompts
from tests.commands import RUN, Done, begin, command
from tests.folders import TEXTS, save_tiny_model

LONG = 400
CLOSING = re.compile(
    r"^(\d+) tokens?, [\d.]+ tokens/s, mean acceptance length ([\d.]+), first token after ([\d.]+) s$", re.M
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_model(folder / "model")
    return folder


def run(room: Path, *options: str, text: bytes = b"") -> Done:
    return command(room, RUN, "--model", "model", "--strategy", "plain", *options, given=text, TERM="dumb")


class Terminal:
    """A chat in a pseudo terminal, whose standard error goes to a file."""

    def __init__(self, room: Path, *options: str) -> None:
        self._end, self._inner = pty.openpty()
        self._errors = room / "errors.txt"
        terminal = Path(os.ttyname(self._inner))
        given = ("--model", "model", "--strategy", "lookup", *options)
        self.process = begin(room, RUN, *given, streams=[terminal, terminal, self._errors], TERM="dumb")
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 90.0) -> str:
        """Everything that was shown up to `text`, which is consumed."""
        until = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self._end], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{text!r} was not shown: {self.shown!r} {self.errors()!r}"
            self.shown += os.read(self._end, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt until it is shown again.

        Python loses a signal that comes between the prompt and the wait for a key, until the next key.
        """
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for(">>> ", seconds=3.0)
                return
        raise AssertionError(f"Ctrl-C changes nothing: {self.shown!r} {self.errors()!r}")

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def errors(self) -> str:
        return self._errors.read_text()

    def ended(self) -> int | None:
        self.process.join(30)
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        os.close(self._end)
        os.close(self._inner)


@pytest.fixture
def terminal(room: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    chat = Terminal(room, *getattr(request, "param", ()))
    yield chat
    chat.close()


def turns(room: Path, *messages: str) -> list[str]:
    """The answers of the command to growing conversations."""
    asked: list[dict[str, str]] = []
    answers = []
    for message in messages:
        asked.append({"role": "user", "content": message})
        (room / "one.jsonl").write_text(json.dumps({"messages": asked}))
        done = run(room, "--prompts", "one.jsonl", "--max-new-tokens", "12", "--json")
        answers.append(json.loads(done.stdout.splitlines()[0])["text"])
        asked.append({"role": "assistant", "content": answers[-1]})
    return answers


def visible(text: str) -> str:
    """Letters of a text: a terminal shows control characters in ways of its own."""
    return "".join(c for c in text if c.isascii() and c.isalnum())


@pytest.mark.parametrize("terminal", [("--max-new-tokens", "12", "--record", "talk.jsonl")], indirect=True)
def test_a_chat_remembers_and_records_what_was_said_until_it_is_reset(room: Path, terminal: Terminal) -> None:
    """A turn that fails leaves the conversation as it was."""
    first, second = turns(room, "The river", "And then?")
    terminal.wait_for(">>> ")
    shown = []
    for line in ("The river", "many words " * 80, "And then?", "/help", "/reset", "The river", "/zap"):
        terminal.type(line + "\n")
        if not line.startswith("many"):
            terminal.wait_for(line)
        shown.append(visible(terminal.wait_for(">>> ")))
    del shown[1]  # the long line, as the terminal wraps it
    assert shown == [visible(first), visible(second), "", "", visible(first), ""]
    said = terminal.errors()
    assert "Ctrl-C ends an answer" in said
    assert "error: /zap: no such command" in said
    assert "/reset begins a new conversation" in said
    assert "note: recording every prompt" in said
    assert len(CLOSING.findall(said)) == 3
    terminal.type("\x04")
    assert terminal.ended() == 0
    recorded = [prompt.messages for prompt in read_prompts(room / "talk.jsonl")]
    assert recorded[0] == (("user", "The river"),)
    assert [each[-1] for each in recorded if len(each) == 3] == [("user", "And then?")]


@pytest.mark.parametrize("terminal", [("--max-new-tokens", str(LONG), "--quiet")], indirect=True)
def test_ctrl_c_ends_the_answer_and_not_the_chat(terminal: Terminal) -> None:
    terminal.wait_for(">>> ")
    terminal.type("half a line")
    # Ctrl-C drops keys that were not read yet; readline, which knows of them, would wait for others, deaf to Ctrl-C.
    terminal.wait_for("half a line")
    terminal.interrupt()
    terminal.type("The river\n")
    terminal.wait_for("The river")
    while len(terminal.shown) < 30:
        terminal.shown += os.read(terminal._end, 100).decode(errors="replace")
    os.kill(terminal.process.pid or 0, signal.SIGINT)
    cut = terminal.wait_for(">>> ")
    assert len(cut) < LONG * 0.8
    terminal.type("Go on\n")
    terminal.wait_for("Go on")
    time.sleep(0.1)
    terminal.interrupt()
    terminal.type("/exit\n")
    assert terminal.ended() == 0
    assert not CLOSING.search(terminal.errors())


def test_standard_input_is_a_prompt(room: Path) -> None:
    options = ["--max-new-tokens", "12"]
    given = run(room, *options, "The river\nrose")
    piped = run(room, *options, text=b"The river\nrose\n")
    assert piped.stdout == given.stdout != ""
    assert CLOSING.search(piped.stderr)
    assert run(room, *options, "--quiet", text=b"The river").stderr == ""
    assert run(room, *options, "--json", text=b"The river").stdout.count("\n") == 2
    ignored = run(room, *options, "The river\nrose", text=b"something else")
    assert ignored.stdout == given.stdout


def test_the_closing_line_sums_a_file(room: Path) -> None:
    (room / "three.jsonl").write_text('{"prompt": "The river"}\n{"prompt": "The baker"}\n{"prompt": "Ada"}\n')
    for more, says in (((), ""), (("--concurrency", "3"), " tokens/s together with prefills")):
        done = run(room, "--prompts", "three.jsonl", "--max-new-tokens", "10", "--json", *more)
        [line] = done.stderr.splitlines()
        assert line.startswith("3 prompts, 30 tokens, ")
        assert line.endswith(says or " s")
        total = json.loads(done.stdout.splitlines()[-1])["summary"]
        assert f"{total['tokens_per_second']:.1f} tokens/s" in line


def test_what_was_asked_is_recorded_without_what_the_pattern_matches(room: Path) -> None:
    words = TEXTS[0].split()
    lines = [json.dumps({"turns": [" ".join(words[i % 5 : 6 + i]), f"Call 030 123{i}"]}) for i in range(14)]
    (room / "asked.jsonl").write_text("\n".join(lines))
    record = ["--record", "mine.jsonl", "--record-redact", r"\d[\d ]+"]
    done = run(room, "--prompts", "asked.jsonl", "--all-turns", "--max-new-tokens", "4", *record)
    assert done.returncode == 0, done.stderr
    recorded = read_prompts(room / "mine.jsonl")
    assert len(recorded) == 28
    assert sum(len(prompt.messages) == 3 for prompt in recorded) == 14
    # The random ids of lines may have any digits.
    records = [json.loads(line) for line in (room / "mine.jsonl").read_text().splitlines()]
    assert "123" not in json.dumps([record["messages"] for record in records])
