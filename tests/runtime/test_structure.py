"""Answers with a shape: valid, plain decoding's under the same grammar, and faster where that leaves one way."""

from __future__ import annotations

import json
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime import CustomGenerate, Structure, StructureProcessor
from ssd_runtime.commands.run import main
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.lookup import LookupPlanner, best_guess, worth_verifying
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.planning.settings import LookupSettings
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sampling.sampler import Sampler
from ssd_runtime.sequence.session import Session
from ssd_runtime.structure.grammars import Grammars
from ssd_runtime.structure.matcher import MOST_RUN
from tests.card import stand_in
from tests.commands import Done, assert_refused, call_within
from tests.structures import LEAVES, SCHEMAS, assert_valid, structured_model
from tests.tables import latency_table

LOADED = structured_model()
DECODER = Decoder(LOADED.model)
HEADS = ExitHeads(DECODER)
GRAMMARS = LOADED.grammars
LAYERS = DECODER.shape.num_layers
TABLE = latency_table(LAYERS, per_token=1e-7)
PROMPT = LOADED.encode([("user", "the baker")])
VOCABULARY = DECODER.shape.vocabulary
PERSON = {
    "type": "object",
    "properties": {"the name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["the name", "age"],
    "additionalProperties": False,
}


class Wild:
    """Drafts random trees, most tokens of which the grammar does not allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        yield from ()
        tokens = list[int]()
        matcher = session.matcher
        assert matcher is not None
        for _ in range(length):
            path = [session.pending, *tokens]
            some = [self._random.randrange(VOCABULARY) for _ in range(40)]
            allowed = [token for token in some if matcher.allows(session.ids, path, token)]
            tokens.append(allowed[0] if allowed and self._random.random() < 0.9 else some[0])
        return Draft.branching(tokens, [[self._random.randrange(VOCABULARY) for _ in range(2)] for _ in tokens])


def planner_of(kind: str, seed: int) -> Planner:
    mask = SubLayerPlan.of(LAYERS, {seed % (2 * LAYERS), 3, 4})
    if kind == "lookup":
        return LookupPlanner(TABLE, LookupSettings(), LookupStats())
    drafter: Any = {
        "chain": Masked(mask),
        "tree": Masked(mask, 0.1, ((0.5, 3), (1.0, 2))),
        "exit": EarlyExit(HEADS, (2, 4), 0.05),
        "wild": Wild(seed),
    }[kind]
    return ConstantPlanner(Plan(kind, drafter, 1 + seed % 7))


def decoded(grammar: Any, planner: Planner, sampling: SamplingParams, tokens: int = 40) -> Generation:
    matcher = grammar.matcher()
    held = replace(sampling, grammar=grammar)
    limits = Limits(tokens, LOADED.eos_ids, matcher.completes)
    return generate(Session(DECODER, held), PROMPT, planner, limits)


@pytest.mark.parametrize("kind", ["chain", "tree", "lookup"])
def test_a_structure_holds_on_a_card(kind: str) -> None:
    grammar = GRAMMARS.compiled(Structure.json_schema(PERSON))
    held = SamplingParams(grammar=grammar)
    limits = Limits(40, LOADED.eos_ids, grammar.matcher().completes)
    card = Decoder(deepcopy(LOADED.model).to(stand_in().device))
    got = generate(Session(card, held), PROMPT, planner_of(kind, 3), limits)
    assert got.token_ids == decoded(grammar, PlainPlanner(), SamplingParams()).token_ids


@settings(max_examples=20)
@given(schema=SCHEMAS, seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 0.8, 2.0]), rejection=st.booleans())
def test_any_draft_gives_plain_decoding_under_the_same_grammar(
    schema: dict[str, Any], seed: int, temperature: float, rejection: bool
) -> None:
    grammar = GRAMMARS.compiled(Structure.json_schema(schema))
    top_p = 0.9 if temperature and seed % 2 else 1.0
    sampling = SamplingParams(temperature=temperature, seed=seed, top_p=top_p, repetition_penalty=1.1)
    plain = decoded(grammar, PlainPlanner(), sampling)
    assert_valid(schema, plain)
    for kind in ("lookup", "chain", "tree", "exit", "wild"):
        rejected = rejection and temperature > 0.0 and kind in ("chain", "exit")
        got = decoded(grammar, planner_of(kind, seed), replace(sampling, rejection=rejected))
        assert_valid(schema, got)
        if not rejected:
            held = Session(DECODER, replace(sampling, grammar=grammar))
            difference = compare(held, PROMPT, plain.token_ids, got.token_ids)
            assert difference.kind is not Kind.ERROR, (kind, difference, plain.token_ids, got.token_ids)


@given(schema=SCHEMAS, seed=st.integers(0, 999))
@settings(max_examples=25)
def test_a_matcher_goes_to_any_row_of_a_tree(schema: dict[str, Any], seed: int) -> None:
    """However it came there, it allows what a new one allows; tokens that are forced are the only ones."""
    grammar = GRAMMARS.compiled(Structure.json_schema(schema))
    matcher = grammar.matcher()
    draw = random.Random(seed)
    known, paths = list[int](), [list[int]()]
    matcher.restart(0)
    for _ in range(30):
        path = draw.choice(paths)
        allowed = matcher.masked(torch.zeros(VOCABULARY), known, path) == 0.0
        fresh = grammar.matcher()
        assert torch.equal(allowed, fresh.masked(torch.zeros(VOCABULARY), (), [*known, *path]) == 0.0)
        tokens = allowed.nonzero()[:, 0].tolist()
        forced = matcher.forced(known, path)
        assert forced == (tokens[0] if len(tokens) == 1 else None)
        asked = [draw.randrange(VOCABULARY), draw.choice(tokens)]
        assert [matcher.allows(known, path, token) for token in asked] == [bool(allowed[token]) for token in asked]
        if (token := asked[draw.random() < 0.9]) not in LOADED.eos_ids and allowed[token]:
            paths.append([*path, token])
        if draw.random() < 0.2 and len(paths) > 1:  # a path is accepted
            known = [*known, *paths[-1]]
            paths = [[]]


@settings(max_examples=10)
@given(count=st.integers(1, 8), seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.8]))
@example(count=5, seed=17, temperature=0.8)
def test_characters_of_several_tokens_are_cut_as_plain_and_stock_decoding_cut_them(
    count: int, seed: int, temperature: float
) -> None:
    """A run of certain tokens that ends within a character says nothing of the tokens after it."""
    name = "a" + "😀" * count
    properties = {name: {"enum": ["😀😀😀😀x", "😀😀😀y"]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [name, "b"], "additionalProperties": False}
    grammar = GRAMMARS.compiled(Structure.json_schema(schema))
    sampling = SamplingParams(temperature=temperature, seed=seed)
    plain = decoded(grammar, PlainPlanner(), sampling, 90).token_ids
    for kind in ("lookup", "chain", "tree", "exit", "wild"):
        assert decoded(grammar, planner_of(kind, seed), sampling, 90).token_ids == plain
    matcher = grammar.matcher()
    for place in range(len(plain)):
        forced = matcher.forced((), plain[:place])
        assert forced == grammar.matcher().forced((), plain[:place])
        assert forced in (None, plain[place])


LETTERS = [LOADED.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]


def cut_otherwise_from_the_middle(letters: list[int]) -> tuple[Structure, list[int]]:
    """A structure and an answer in it, with forced texts of which `'s` is a token of the second half alone."""
    structure = Structure.regex("([a-c]:'sthe){6}")
    matcher, answer = GRAMMARS.compiled(structure).matcher(), list[int]()
    while not (answer and matcher.completes(answer)):
        forced = matcher.forced(answer, ())
        answer.append(letters[len(answer) % len(letters)] if forced is None else forced)
    return structure, answer


@settings(max_examples=100)
@given(letters=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=6), seed=st.integers(0, 9999))
def test_a_forced_text_is_cut_as_it_began_whatever_is_drafted_around_it(letters: list[int], seed: int) -> None:
    structure, answer = cut_otherwise_from_the_middle(letters)
    matcher, draw = GRAMMARS.compiled(structure).matcher(), random.Random(seed)
    for known in range(len(answer)):
        for end in range(known, min(known + draw.randrange(1, 12), len(answer))):
            assert matcher.forced(answer[:known], answer[known:end]) in (None, answer[end])


def test_an_answer_that_goes_on_within_a_forced_text_ends_as_it_would_have() -> None:
    settings = RunSettings("plain", max_new_tokens=40, structure=cut_otherwise_from_the_middle(LETTERS)[0])
    engine = Engine(LOADED)
    [whole] = engine.generate(["abc"], settings)
    ids = whole.generation.token_ids
    for cut in range(len(ids)):
        request = engine.add_request("abc", settings, answered=ids[:cut])
        while not request.done:
            engine.step()
        assert request.outcome().generation.token_ids == ids


def test_a_long_run_of_certain_tokens_is_found_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find it takes milliseconds, for which all other sequences wait."""
    text = "the river " * 400
    grammar, answer, searches = GRAMMARS.compiled(Structure.choice([text])), list[int](), list[int]()
    matcher = grammar.matcher()
    state = matcher._state

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name == "compute_ff_tokens":
                searches.append(len(answer))
            return getattr(state, name)

    monkeypatch.setattr(matcher, "_state", Counting())
    while (token := matcher.forced(answer, ())) is not None and token not in LOADED.eos_ids:
        answer.append(token)
    assert LOADED.tokenizer.decode(answer) == text
    assert len(answer) > 2 * MOST_RUN
    assert len(searches) <= len(answer) // MOST_RUN + 2


def test_certain_tokens_cost_no_step_of_their_own() -> None:
    grammar = GRAMMARS.compiled(Structure.json_schema(PERSON))
    plain = decoded(grammar, PlainPlanner(), SamplingParams())
    got = decoded(grammar, LookupPlanner(TABLE, LookupSettings(recycle=0), LookupStats()), SamplingParams())
    assert assert_valid(PERSON, got)
    assert got.token_ids == plain.token_ids
    first = got.cycles[0]
    assert first.drafted == first.accepted >= len("he name") - 2
    matcher = grammar.matcher()
    free = sum(matcher.forced((), got.token_ids[:place]) is None for place in range(len(got.token_ids)))
    assert got.target_forwards <= free + 1 < len(got.token_ids) / 1.5


def test_certain_tokens_are_verified_whatever_the_budget() -> None:
    costs = [1.0 + 0.2 * rows for rows in range(9)]
    certain = [Node(token=1, parent=row, probability=1.0, depth=row + 1) for row in range(4)]
    tree = [*certain, Node(token=2, parent=4, probability=0.9, depth=5)]
    assert worth_verifying(tree, costs, most_cost=1.0).tokens == 5.9
    assert worth_verifying(tree[-1:], costs, most_cost=1.0).tree == ()
    lookup = Lookup(LookupStats())
    matcher = GRAMMARS.compiled(Structure.json_schema({"const": "the baker"})).matcher()
    matcher.restart(len(PROMPT))
    lookup.start(PROMPT, matcher)
    guess = best_guess(lookup, costs, depth=24, most_cost=1.0)
    assert [node.probability for node in guess.tree] == [1.0] * 8
    assert LOADED.decode([node.token for node in guess.tree]) == '"the baker"'


def test_every_sequence_of_a_batch_follows_its_own_structure() -> None:
    engine = Engine(LOADED)
    engine.latency = TABLE
    structures = [None, *(Structure.json_schema(each) for each in LEAVES), Structure("regex", "(the|he){3}")]
    strategies = ["auto", "lookup", "swift", "plain", "clasp", "knapsack"]
    wanted = [
        RunSettings(
            strategies[place % len(strategies)],
            max_new_tokens=30,
            structure=structure,
            sampling=SamplingParams(temperature=0.7 * (place % 3), seed=place),
        )
        for place, structure in enumerate(structures * 2)
    ]
    requests = [engine.add_request(PROMPT, each) for each in wanted]
    while not all(request.done for request in requests):
        engine.step()
    for each, request in zip(wanted, requests, strict=True):
        generation = request.outcome().generation
        turn = request.turn
        alone = generate(Session(DECODER, turn.sampling), PROMPT, PlainPlanner(), turn.limits)
        difference = compare(Session(DECODER, turn.sampling), PROMPT, alone.token_ids, generation.token_ids)
        assert difference.kind is not Kind.ERROR, (each, alone.token_ids, generation.token_ids)
        if each.structure is not None and each.structure.kind == "json_schema":
            assert_valid(json.loads(each.structure.text), generation)
    assert sum(request.outcome().generation.finish_reason == "stop" for request in requests) >= 10


def test_rejection_draws_from_what_the_grammar_allows() -> None:
    grammar = GRAMMARS.compiled(Structure.choice(["b", "h", "t"]))
    allowed = [LOADED.tokenizer.convert_tokens_to_ids(letter) for letter in "bht"]
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.randn(2, VOCABULARY, generator=generator) * 1.5
    sampler = Sampler(SamplingParams(temperature=1.5, rejection=True, grammar=grammar))
    counts = Counter[int]()
    draws = 3000
    for _ in range(draws):
        proposal = sampler.propose(draft, [], list)
        assert proposal.token in allowed
        assert proposal.probs is not None
        counts[sampler.choose(target[None], [], lambda: [[]], [(proposal.token, proposal.probs)])(0)] += 1
    expected = (target[allowed] / 1.5).softmax(-1) * draws
    assert sorted(counts) == sorted(allowed)
    assert chisquare([counts[token] for token in allowed], expected.numpy()).pvalue > 1e-4


END = next(iter(LOADED.eos_ids))


@pytest.fixture
def processor() -> StructureProcessor:
    return StructureProcessor(Structure.json_schema(PERSON), LOADED.tokenizer, LOADED.model)


def generated(processor: StructureProcessor, ids: torch.Tensor, **settings: Any) -> Any:
    """The output of transformers' `generate`."""
    common = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    return LOADED.model.generate(ids, logits_processor=[processor], **common | settings)


def person_in(answer: list[int]) -> str:
    """The text of an answer, which must be a whole person."""
    text = LOADED.decode(answer[: answer.index(END)])
    jsonschema.validate(json.loads(text), PERSON)
    return text


@pytest.mark.parametrize("do_sample", [False, True])
def test_generate_is_held_to_a_structure_by_stock_decoding_and_by_ours(
    processor: StructureProcessor, do_sample: bool
) -> None:
    texts, ids = list[list[str]](), torch.tensor([PROMPT, PROMPT])
    for more in ({}, {"custom_generate": CustomGenerate(strategy="swift")}):
        torch.manual_seed(3)
        answers = generated(processor, ids, do_sample=do_sample, **more)[:, len(PROMPT) :].tolist()
        texts.append([person_in(answer) for answer in answers])
    assert do_sample or texts[0] == texts[1]


def test_raw_logits_are_the_models_own_under_a_structure(processor: StructureProcessor) -> None:
    given = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    ids = torch.tensor([PROMPT])
    stock, ours = (generated(processor, ids, **given, **more) for more in ({}, {"custom_generate": CustomGenerate()}))
    for expected, got in zip(stock.logits, ours.logits, strict=True):
        assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"prompt_lookup_num_tokens": 4}, {"num_beams": 3}])
def test_a_processor_follows_prompts_that_grow_and_tokens_that_are_taken_back(
    processor: StructureProcessor, more: dict[str, int]
) -> None:
    ids = torch.tensor([PROMPT])
    for _ in range(3):
        out = generated(processor, ids, **more)
        person_in(out[0, ids.shape[1] :].tolist())
        ids = torch.cat([out, ids], 1)  # the next turn of a chat


def test_the_command_answers_in_the_shape_that_a_file_asks_for(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no"\n')

    def run(*options: str) -> Done:
        common = ("-m", str(folder), "--strategy", "plain", "--draft-bits", "none", "-n", "60", "Who?")
        return call_within(monkeypatch, capfd, tmp_path, main, *common, *options)

    jsonschema.validate(json.loads(run("--json-schema", "person.json").stdout), PERSON)
    assert run("--grammar", "answer.gbnf").stdout in ("yes\n", "no\n")
    for options, told in (
        (("--regex", "("), "regular expression cannot be used"),
        (("--json-schema", "absent.json"), "--json-schema: absent.json cannot be read"),
        (("--regex", "a", "--grammar", "answer.gbnf"), "give one of them"),
    ):
        assert_refused(run(*options), told)


def test_without_end_tokens_no_answer_ends_and_no_id_without_a_token_is_allowed() -> None:
    grammar = Grammars(LOADED.tokenizer, VOCABULARY + 5, ()).compiled(Structure.regex("[a-z ]*"))
    logits = grammar.matcher().masked(torch.zeros(VOCABULARY + 5), (), ())
    allowed = set(logits.isfinite().nonzero().flatten().tolist())
    assert allowed
    assert LOADED.tokenizer.eos_token_id not in allowed
    assert max(allowed) < len(LOADED.tokenizer)


def test_what_is_forced_after_a_path_does_not_hang_on_the_paths_asked_about_before() -> None:
    grammar, asked = GRAMMARS.compiled(Structure.choice(["the baker ate", "who else the"])), list[int | None]()
    paths = [LOADED.tokenizer.encode(text, add_special_tokens=False) for text in ("the baker ate", "who else the")]
    matcher = grammar.matcher()
    for place in range(min(map(len, paths))):
        for path in paths:
            asked.append(matcher.forced((), path[:place]))
            assert asked[-1] == grammar.matcher().forced((), path[:place])
    assert set(asked) > {None}
