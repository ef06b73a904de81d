"""The comparison with llama.cpp's server: its own times, its options, contenders in turn."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from bench.at_once import theirs
from bench.harness.contenders import PLAIN, Decode, Timed, ours
from bench.harness.ledger import NAME, Ledger, read_comparison
from bench.harness.turns import decode_in_turn
from bench.llama_cpp import LLAMA, SPECULATIONS, serving, tell, version
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from tests.folders import TEXTS
from tests.serving import tiny_engine

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new = asked["n_predict"]
        # Fields of an answer of llama-server, build 11434.
        timings = {"cache_n": 0, "prompt_n": len(asked["prompt"]), "prompt_ms": 250.0, "predicted_n": new,
                   "predicted_ms": 1500.0, "predicted_per_second": (new - 1) / 1.5}
        answer = json.dumps({"tokens": asked["prompt"][-1:] * new, "timings": timings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A stand-in for llama-server."""


def test_a_server_is_asked_for_as_many_tokens_as_ours_and_ends_with_the_comparison(tmp_path: Path) -> None:
    with serving([sys.executable, "-c", SERVER], tmp_path / "log") as decode:
        answer = decode([3, 5], 4)
    assert answer == Timed(token_ids=[5] * 4, first_seconds=0.25, seconds=1.5, counted=3)
    with pytest.raises(OSError, match="refused"):
        decode([3, 5], 4)


def test_several_clients_get_the_answers_of_their_prompts(tmp_path: Path) -> None:
    with serving([sys.executable, "-c", SERVER], tmp_path / "log", slots=3) as decode:
        assert theirs(decode)([[number] for number in range(7)], 2, 3) == [[number] * 2 for number in range(7)]


def test_a_server_that_cannot_start_is_told_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for command, why in ((["false"], f"ended before it could answer; {log} says why"), (["./none"], "cannot be run")):
        with pytest.raises(UserError, match=why), serving(command, log):
            pass


def test_a_server_that_never_answers_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.llama_cpp.PATIENCE", 0.2)
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(UserError, match="not ready after 0 s"), serving(silent, tmp_path / "log"):
        pass


def test_a_servers_build_is_known(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho loading\necho 'version: 11434 (abc)' >&2\necho 'built with GNU 12' >&2\n")
    server.chmod(0o755)
    assert version(server) == "version: 11434 (abc); built with GNU 12"
    with pytest.raises(UserError, match="cannot be run"):
        version(tmp_path / "none")


def test_contenders_decode_the_same_prompts_in_turn_and_the_fastest_speculation_is_named(
    folder: Path, tmp_path: Path
) -> None:
    asked = list[tuple[str, tuple[int, ...]]]()
    engine = tiny_engine(folder)
    slow, fast = f"{LLAMA} {SPECULATIONS[0]}", f"{LLAMA} {SPECULATIONS[1]}"
    seconds = {LLAMA: 0.5, slow: 1.0, fast: 0.25}

    def peer(name: str, ids: list[int], new: int) -> Timed:
        asked.append((name, tuple(ids)))
        return Timed(token_ids=[0] * new, first_seconds=0.1, seconds=seconds[name], counted=new - 1)

    def make(name: str, stream: str) -> Decode:
        streams.append(stream)
        return partial(peer, name) if name in seconds else ours(engine, name, stream)

    streams = list[str]()
    contenders = {name: partial(make, name) for name in (*seconds, PLAIN, "auto")}
    ledger = Ledger(tmp_path / NAME, {"contenders": list(contenders)})
    prompts = [Prompt(str(number), turns=(text[:40],)) for number, text in enumerate(TEXTS[:2])]
    console = Console(record=True, width=160)
    decode_in_turn(ledger, engine, contenders, prompts, 6, compared=(PLAIN, "auto"), console=console)
    assert len(set(streams)) == len(streams), "no stream has the keys of another's prompt"
    _, rows = read_comparison(tmp_path / NAME)
    assert [row.contender for row in rows] == list(contenders) * 2
    assert {row.divergence for row in rows if row.contender in (PLAIN, "auto")} == {"none"}
    assert len({ids for _, ids in asked}) == 3
    assert len({name for name, _ in asked[::3]}) > 1, "the order rotates"
    tell(ledger, list(seconds), console)
    assert f"fastest setting on these prompts: {fast}" in console.export_text()
    short = Ledger(tmp_path / "short.jsonl", {"contenders": list(contenders)})
    decode_in_turn(short, engine, contenders, prompts, 1, compared=(PLAIN, "auto"), console=console)
    tell(short, list(seconds), console)
    assert "–" in console.export_text(), "answers of one token have no speed"
