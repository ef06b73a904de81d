"""Tokens/s of answers that are held to a schema, against free text and against llama.cpp's grammar.

`python -m bench.structured --model demo@wheel` extracts what 20 short texts say, greedily and in turn: free text and
JSON, each plainly and by `auto`, prefills left out. With `--server build/llama.cpp/bin/llama-server` that answers the
same prompts with the same schemas.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import jsonschema
import torch

from bench.llama_cpp import serving
from ssd_runtime import Engine, RunSettings, Structure
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.loading.sources import find_packed
from ssd_runtime.structure.matcher import Matcher

GUESSING = "auto without certain tokens"
TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 100_000}
YES_OR_NO: dict[str, Any] = {"type": "boolean"}
DATE: dict[str, Any] = {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}


def _one_of(*texts: str) -> dict[str, Any]:
    return {"enum": list(texts)}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


CASES: list[tuple[dict[str, Any], str]] = [
    (
        _object(name=TEXT, city=TEXT, occupation=TEXT, age=NUMBER, languages=_list(TEXT)),
        "Maria Gonzales, 34, is a nurse from Seville who speaks Spanish.",
    ),
    (
        _object(product=TEXT, price_in_cents=NUMBER, currency=_one_of("EUR", "USD", "GBP"), in_stock=YES_OR_NO),
        "The red kettle costs 29.90 euros and is sold out.",
    ),
    (
        _object(sentiment=_one_of("positive", "neutral", "negative"), topics=_list(TEXT), summary=TEXT),
        "Lovely staff, but the room was cold and smelled of paint.",
    ),
    (
        _object(event=TEXT, date=DATE, attendees=_list(_object(name=TEXT, role=_one_of("speaker", "guest", "host")))),
        "On 3 May 2024 Ana Ruiz opens the spring fair; Tom Lee speaks.",
    ),
    (
        _object(
            order_number=NUMBER, customer=_object(name=TEXT, email=TEXT), items=_list(_object(sku=TEXT, count=NUMBER))
        ),
        "Order 4711 for Kim Park, kim@park.example: 2 of A-17.",
    ),
    (
        _object(language=_one_of("python", "c", "rust", "other"), bug=TEXT, severity=NUMBER, fix=TEXT),
        "for i in range(len(x) + 1): s += x[i]",
    ),
    (
        _object(dish=TEXT, minutes=NUMBER, ingredients=_list(_object(name=TEXT, amount=TEXT)), vegetarian=YES_OR_NO),
        "Boil 200 g of lentils with a carrot for 25 minutes.",
    ),
    (
        _object(origin=TEXT, destination=TEXT, transport=_one_of("train", "plane", "bus", "ship"), hours=NUMBER),
        "The night train takes 11 hours from Oslo to Bergen and on.",
    ),
    (
        _object(question=TEXT, answers=_list(TEXT), correct_answer=_one_of("first", "second", "third")),
        "Which planet is largest? Mars, Jupiter, Venus.",
    ),
    (
        _object(claim=TEXT, verdict=_one_of("true", "false", "unknown"), explanation=TEXT, confidence_percent=NUMBER),
        "Water boils at a lower temperature on mountains.",
    ),
    (
        _object(ticket_title=TEXT, team=_one_of("billing", "network", "hardware"), urgent=YES_OR_NO),
        "Since this morning nobody on the third floor can print, and the auditors come at noon.",
    ),
    (
        _object(patient=TEXT, complaints=_list(TEXT), temperature_in_celsius={"type": "number"}, allergies=_list(TEXT)),
        "Mr Okafor has coughed for a week, 38.4 degrees, no penicillin please.",
    ),
    (
        _object(title=TEXT, authors=_list(TEXT), year=NUMBER, pages=NUMBER, publisher=_or_null(TEXT)),
        "A. Byrne and L. Sato wrote the 312 pages of 'Tidal Maps' in 1998.",
    ),
    (
        _object(function_name=TEXT, parameters=_list(_object(name=TEXT, type=TEXT)), returns=TEXT),
        "def area(width: float, height: float) -> float",
    ),
    (
        _object(team_home=TEXT, team_away=TEXT, goals_home=NUMBER, goals_away=NUMBER, scorers=_list(TEXT)),
        "Rovers beat Albion 2:1 at home; Finch and Mbeki scored for them, Hale for the guests.",
    ),
    (
        _object(street=TEXT, house_number=TEXT, postal_code=TEXT, city=TEXT, country=_one_of("DE", "FR", "NL", "BE")),
        "Please send it to Keizersgracht 14b, 1015 CN Amsterdam.",
    ),
    (
        _object(action=_one_of("turn_on", "turn_off", "dim"), room=TEXT, percent=_or_null(NUMBER)),
        "Could you dim the lights in the study to a third?",
    ),
    (
        _object(company=TEXT, revenue_in_millions=NUMBER, change_in_percent={"type": "number"}, outlook=TEXT),
        "Norvik's sales rose 4.5% to 812 million, and it expects a slow spring.",
    ),
    (
        _object(steps=_list(_object(number=NUMBER, instruction=TEXT)), tools=_list(TEXT)),
        "To bleed the radiator, turn off the pump, open the valve with a key, and close it once water comes.",
    ),
    (
        _object(species=TEXT, count=NUMBER, place=TEXT, seen_on=DATE, certain=YES_OR_NO),
        "I am sure those were twelve curlews on the mud at Morecambe on 2 October 2025.",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--server", type=Path, help="llama-server, built for this processor")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("build/structured"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    engine = Engine.open(model=arguments.model, weights="packed")
    with ExitStack() as stack:
        address = None
        if arguments.server is not None:
            index = find_packed(arguments.model).gguf
            assert index is not None
            command = [str(arguments.server), "-m", str(index.path), "-t", str(torch.get_num_threads())]
            address = stack.enter_context(serving(command, arguments.out / "server.log"))
        measure(engine, CASES[: arguments.texts], arguments.max_new_tokens, address)


def measure(engine: Engine, cases: Sequence[tuple[dict[str, Any], str]], new: int, address: Any) -> None:
    """Answer all texts in every way, in turn, and print the rates; the first text warms up."""
    tokens, counts = Counter[str](), Counter[str]()
    seconds = defaultdict[str, float](float)
    compiled, masks = list[float](), list[float]()
    for number, (schema, text) in enumerate([cases[0], *cases]):
        prompt = f"Extract what this says as JSON with the keys {', '.join(schema['properties'])}: {text}"
        structure = Structure.json_schema(schema)
        began = perf_counter()
        grammar = engine.loaded.grammars.compiled(structure)
        took = perf_counter() - began
        ids = engine.loaded.encode([("user", prompt)])
        answers = dict[str, list[int]]()
        for shape, asked in {"free": None, "JSON": structure}.items():
            for strategy in ("plain", "auto", GUESSING) if asked is not None else ("plain", "auto"):
                settings = RunSettings(strategy.partition(" ")[0], max_new_tokens=new, structure=asked)
                with patch.object(Matcher, "forced", return_value=None) if strategy == GUESSING else nullcontext():
                    [outcome] = engine.generate([prompt], settings)
                generation = outcome.generation
                name = f"{shape}, {strategy}"
                answers[name] = generation.token_ids
                if number:
                    tokens[name] += generation.later_tokens
                    seconds[name] += generation.decode_seconds
                if number and asked is not None:
                    counts[f"{name}: {verdict(schema, outcome.text, generation.finish_reason)}"] += 1
        if address is not None:
            timed = address(ids, new, json_schema=schema)
            if number:
                tokens["JSON, llama.cpp"] += timed.counted
                seconds["JSON, llama.cpp"] += timed.seconds
        if number:
            compiled.append(took)
            for strategy in ("auto", GUESSING):
                counts[f"{strategy} is plain: {answers['JSON, plain'] == answers[f'JSON, {strategy}']}"] += 1
            matcher = grammar.matcher()
            logits = torch.zeros(engine.loaded.model.config.vocab_size)
            for place in range(len(answers["JSON, plain"])):
                began = perf_counter()
                if matcher.forced((), answers["JSON, plain"][:place]) is None:
                    matcher.masked(logits, (), answers["JSON, plain"][:place])
                    counts["tokens that were free"] += 1
                masks.append(perf_counter() - began)
                counts["tokens"] += 1
    for name, total in seconds.items():
        print(f"{name}: {tokens[name]} tokens, {tokens[name] / total:.1f} tokens/s")
    for what, count in sorted(counts.items()):
        print(f"{what}: {count}")
    print(f"compiling: median {1e3 * median(compiled):.2f} ms, at most {1e3 * max(compiled):.2f} ms")
    print(f"mask: median {1e6 * median(masks):.0f} µs a token, at most {1e3 * max(masks):.2f} ms")


def verdict(schema: dict[str, Any], text: str, finish_reason: str) -> str:
    """`cut` by a limit, else `valid` or `invalid`."""
    if finish_reason != "stop":
        return "cut"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"


if __name__ == "__main__":
    run_guarded(main)
