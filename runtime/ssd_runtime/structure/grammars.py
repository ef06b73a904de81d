"""Compiles structures for one tokenizer."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedTokenizerBase

from ssd_profiles.errors import first_line
from ssd_profiles.printable import printable
from ssd_runtime.devices.memory import return_freed
from ssd_runtime.structure.matcher import Matcher
from ssd_runtime.structure.structure import STYLE, Structure, StructureError

if TYPE_CHECKING:
    from llguidance import LLMatcher

STEP_FUEL = 100_000
MOST_STATES = 20_000
"""Bounds of the work for one token, and of the states of all tokens, which take 1 to 2 kB each. Without them, an
expression such as `a{1000000}` takes a second for a token."""
MOST_GRAMMAR_BYTES = 40 << 20
"""Bytes of a grammar with all these states; a usual one has about 0.1 MB. llguidance does not tell the size."""
MOST_BYTES = 480 << 20
"""Most memory for compiled grammars that are kept."""
MOST_KEPT = MOST_BYTES // MOST_GRAMMAR_BYTES
MOST_REASON = 200
MOST_RULES, MOST_REFERENCES = 200, 1000
"""Most rules of a grammar and references of a schema: llguidance's time for the first token grows with the square of
rules that refer to each other in turn, each of which may be empty: 200 take 3 seconds on Zen 3, 300 took 6."""
RULE = re.compile(r'^[ \t]*[?!]?\w(?:[^:"/\n]|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)*/)*:', re.MULTILINE)
"""The name of a rule or a terminal with its attributes, whose texts may have colons."""
LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
"""Pattern of grammars in Lark's notation. llguidance's own takes time with the square of empty lines."""
STACK_BYTES = 256 << 20
"""Address space of a stack on which as many rules as a structure can have refer to each other in turn."""
STACK_SIZE = Lock()
"""Held while new threads get this stack; the size is the process's."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled structure."""

    initial: LLMatcher
    """llguidance's state at the beginning of an answer; its copies share one cache."""
    eos_ids: frozenset[int]
    never: tuple[int, ...]
    """Tokens by which llguidance would end an answer, but the model does not, and ids without a token."""
    text_of: Callable[[list[int]], str]

    def matcher(self) -> Matcher:
        """Make the matcher of one answer."""
        return Matcher(self.initial.deep_copy(), self.eos_ids, self.never, self.text_of)


class Grammars:
    """Compiles structures, and keeps the latest ones; several threads may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: Collection[int]) -> None:
        """`vocabulary` is the model's, which may be larger than the tokenizer's."""
        self._hf = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._eos_ids = frozenset(eos_ids)
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()
        self._lock = Lock()
        self._preparing = Lock()

    def compiled(self, structure: Structure) -> Grammar:
        """The grammar of a structure. Raises StructureError if llguidance is missing or refuses the structure.

        A usual schema takes a few milliseconds and a hostile one seconds, in which other threads run; the first call
        takes seconds more, to read the tokenizer.
        """
        with self._lock:
            if (known := self._kept.get(structure)) is not None:
                self._kept.move_to_end(structure)
                return known
        initial = self._read(structure)
        # Without end tokens, llguidance takes one by its name.
        padding = range(len(self._hf), self._vocabulary)
        never = (*sorted(set(self._tokenizer.eos_tokens) - self._eos_ids), *padding)
        grammar = Grammar(initial, self._eos_ids, never, self._tokenizer.decode_str)
        with self._lock:
            self._kept[structure] = grammar
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _read(self, structure: Structure) -> LLMatcher:
        try:
            import llguidance
            from llguidance.gbnf_to_lark import gbnf_to_lark
        except ImportError:
            raise StructureError(
                "structure: needs llguidance; install it with pip install '.[structured]' in a clone"
            ) from None
        with self._preparing:
            tokenizer = self._tokenizer
        kinds = llguidance.LLMatcher
        limits = llguidance.LLParserLimits(
            step_lexer_fuel=STEP_FUEL, max_lexer_states=MOST_STATES, verbose_errors=False
        )

        def compiled(text: str) -> LLMatcher:
            found = kinds(tokenizer, text, log_level=0, limits=limits)
            if not found.is_error():
                found.compute_bitmask()  # some grammars prove too large, or empty, at the first token
            return found

        try:
            if structure.kind == "json_schema":
                text = kinds.grammar_from_json_schema(structure.text, defaults=STYLE)
            elif structure.kind == "regex":
                text = kinds.grammar_from_regex(structure.text)
            else:
                lark = structure.text
                if not LARK.search(lark):
                    _require_few("rules", lark.count("::="), MOST_RULES)
                    lark = gbnf_to_lark(lark)
                _require_few("rules", len(RULE.findall(lark)), MOST_RULES)
                text = kinds.grammar_from_lark(lark)
            _require_few("references", structure.text.count('"$ref"'), MOST_REFERENCES)
            found = _on_deep_stack(partial(compiled, text))
        except StructureError:
            raise
        except Exception as error:  # the converter of llama.cpp's notation raises that of no kind
            raise _refused(structure, str(error)) from None
        if found.is_error():
            raise _refused(structure, found.get_error())
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        ends = sorted(self._eos_ids) or None
        try:
            backend = copy(self._hf.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            found = LLTokenizer(
                _plain(backend.to_str()), n_vocab=self._vocabulary, eos_token=ends or self._hf.eos_token_id
            )
            return_freed()  # its JSON takes hundreds of MB on the way
            return found
        except Exception as error:  # whatever it raises says that it cannot read this tokenizer
            raise StructureError(
                f"structure: the tokenizer cannot be held to a grammar ({first_line(error)}); omit the structure"
            ) from None


def _plain(tokenizer: str) -> str:
    """A tokenizer in the tokenizers library's JSON form, in which no text but white space is an added token.

    llguidance spells a text that is certain with added tokens, such as `<tool_call>`, but does not take them for that
    text. They are renamed, so that only a grammar that names them by their ids has them.
    """
    state = json.loads(tokenizer)
    vocabulary = state["model"]["vocab"]
    places = (
        vocabulary if isinstance(vocabulary, dict) else {piece: place for place, (piece, _) in enumerate(vocabulary)}
    )
    for token in state["added_tokens"]:
        text, name = token["content"], f"\x02{token['id']}\x03"  # of the length by which llguidance goes back
        if not text.strip():
            continue
        if text in places and isinstance(vocabulary, dict):
            vocabulary[name] = vocabulary.pop(text)
        elif text in places:
            vocabulary[places[text]][0] = name
        if text == state["model"].get("unk_token"):
            state["model"]["unk_token"] = name
        token |= {"content": name, "special": True}
    return json.dumps(state)


def _require_few(what: str, count: int, most: int) -> None:
    if count > most:
        raise StructureError(f"structure: {count} {what}; give at most {most}")


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with `STACK_BYTES`: llguidance recurses from rule to rule, and crashes without it."""
    pool = ThreadPoolExecutor(1)
    with pool, STACK_SIZE:
        usual = threading.stack_size(STACK_BYTES)
        try:
            running = pool.submit(work)
        finally:
            threading.stack_size(usual)
    return running.result()


def _refused(structure: Structure, reason: str) -> StructureError:
    what = {"json_schema": "schema", "regex": "regular expression", "grammar": "grammar"}[structure.kind]
    # The lines of the grammar around the fault may be ours.
    reason = re.split(r"\n\s*\d+ \| ", reason)[0]
    told = "nothing matches it" if reason.startswith("NoExtension") else printable(" ".join(reason.split()))
    return StructureError(f"structure: the {what} cannot be used ({told[:MOST_REASON]}); change it")
