"""A chat on a terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt, is_text
from ssd_runtime.commands.command import complain
from ssd_runtime.engine.interrupts import FirstInterrupt, handling
from ssd_runtime.engine.offline.runner import Runner
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.output.text_stream import TextStream
from ssd_runtime.engine.turn import naming

PROMPT = ">>> "
HELP = """/help   this text
/reset  begin a new conversation
/exit   leave, as Ctrl-D does
Ctrl-C ends an answer. A line that begins otherwise is a message to the model."""


@dataclass(slots=True)
class Chat:
    """A conversation, turn by turn; each turn reuses the keys and values of those before it."""

    runner: Runner
    messages: list[tuple[str, str]] = field(default_factory=list)
    """Messages so far, as (role, content) pairs."""
    _turns: int = 0

    def answer(self, text: str) -> Outcome:
        """Answer the user's next message; the runner writes it as it comes.

        Ctrl-C ends the answer after the next token. What was written becomes part of the conversation. Raises UserError
        if there is no answer, and the conversation stays as it was.
        """
        asked = [*self.messages, ("user", text)]
        self._turns += 1
        prompt = Prompt(str(self._turns), messages=tuple(asked))
        runner = self.runner
        turn = runner.turn(prompt, place=0, messages=asked, number=runner.number(prompt))
        stream = TextStream(runner.loaded.decode, runner.settings.stops, runner.write)
        interrupt = FirstInterrupt()
        with naming(prompt), handling(interrupt, [signal.SIGINT]):
            limits = turn.limits
            stop = limits.stop
            # With Ctrl-C as a stop, the answer so far is complete and its keys are kept.
            limits = replace(limits, stop=lambda tokens: interrupt.pressed or (stop is not None and stop(tokens)))
            job = turn.start(runner.scheduler, runner.make_planner(), stream.feed, limits=limits)
            generation = runner.scheduler.finish(job)
        stream.close()
        outcome = turn.outcome(generation)
        self.messages = [*asked, outcome.message]
        return outcome


def run_chat(chat: Chat, report: Callable[[Outcome], None]) -> None:
    """Read messages from the terminal and answer them until /exit or Ctrl-D; `report` receives every answer."""
    print("A chat; /help lists what else can be typed.", file=sys.stderr)
    for line in _lines():
        text = line.strip()
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            chat.messages = []
            print("a new conversation", file=sys.stderr)
        elif text == "/help":
            print(HELP, file=sys.stderr)
        elif text.startswith("/") and len(text.split()) == 1:
            complain(f"{text}: no such command; see /help")
        elif text and not is_text(text):
            complain("message: is not valid text in this terminal's encoding")
        elif text:
            try:
                report(chat.answer(text))
            except UserError as error:
                complain(f"{error}; /reset begins a new conversation")


def _lines() -> Iterator[str]:
    """The lines that a user types, up to Ctrl-D; Ctrl-C drops a line."""
    with suppress(ImportError):
        import readline  # noqa: F401 - lines can then be edited, and earlier ones come back with the arrow keys
    shown = sys.stdout.isatty()
    while True:
        try:
            if not shown:
                print(PROMPT, end="", file=sys.stderr, flush=True)
            yield input(PROMPT if shown else "")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
