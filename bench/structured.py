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


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


CASES: list[tuple[dict[str, Any], Sequence[str]]] = [
    (
        _object(name=TEXT, city=TEXT, occupation=TEXT, age=NUMBER, languages=_list(TEXT)),
        ("Maria Gonzales, 34, is a nurse from Seville who speaks Spanish.", "Jo Bell (51) drives a bus in Leeds."),
    ),
    (
        _object(
            product=TEXT, price_in_cents=NUMBER, currency={"enum": ["EUR", "USD", "GBP"]}, in_stock={"type": "boolean"}
        ),
        ("The red kettle costs 29.90 euros and is sold out.", "We have three oak desks left, 180 dollars each."),
    ),
    (
        _object(sentiment={"enum": ["positive", "neutral", "negative"]}, topics=_list(TEXT), summary=TEXT),
        ("Lovely staff, but the room was cold and smelled of paint.", "Best soup I have had in years, and cheap."),
    ),
    (
        _object(
            event=TEXT,
            date={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
            attendees=_list(_object(name=TEXT, role={"enum": ["speaker", "guest", "host"]})),
        ),
        ("On 3 May 2024 Ana Ruiz opens the spring fair; Tom Lee speaks.", "Dr Wu hosts the seminar on 2025-11-30."),
    ),
    (
        _object(
            order_number=NUMBER, customer=_object(name=TEXT, email=TEXT), items=_list(_object(sku=TEXT, count=NUMBER))
        ),
        (
            "Order 4711 for Kim Park, kim@park.example: 2 of A-17.",
            "Bo Lind (bo@lind.example) ordered five B-20, no. 88.",
        ),
    ),
    (
        _object(language={"enum": ["python", "c", "rust", "other"]}, bug=TEXT, severity=NUMBER, fix=TEXT),
        ("for i in range(len(x) + 1): s += x[i]", "char *p = malloc(4); strcpy(p, name);"),
    ),
    (
        _object(
            dish=TEXT,
            minutes=NUMBER,
            ingredients=_list(_object(name=TEXT, amount=TEXT)),
            vegetarian={"type": "boolean"},
        ),
        ("Boil 200 g of lentils with a carrot for 25 minutes.", "Fry two eggs in butter for 4 minutes."),
    ),
    (
        _object(origin=TEXT, destination=TEXT, transport={"enum": ["train", "plane", "bus", "ship"]}, hours=NUMBER),
        ("The night train takes 11 hours from Oslo to Bergen and on.", "Fly from Rome to Cairo in three hours."),
    ),
    (
        _object(question=TEXT, answers=_list(TEXT), correct_answer={"enum": ["first", "second", "third"]}),
        ("Which planet is largest? Mars, Jupiter, Venus.", "What is 7 times 8? 54, 56, 58."),
    ),
    (
        _object(
            claim=TEXT, verdict={"enum": ["true", "false", "unknown"]}, explanation=TEXT, confidence_percent=NUMBER
        ),
        ("Whales are fish.", "Water boils at a lower temperature on mountains."),
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
    cases = [(schema, text) for schema, texts in CASES for text in texts][: arguments.texts]
    with ExitStack() as stack:
        address = None
        if arguments.server is not None:
            index = find_packed(arguments.model).gguf
            assert index is not None
            command = [str(arguments.server), "-m", str(index.path), "-t", str(torch.get_num_threads())]
            address = stack.enter_context(serving(command, arguments.out / "server.log"))
        measure(engine, cases, arguments.max_new_tokens, address)


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
                    tokens[name] += generation.decoded - 1
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
