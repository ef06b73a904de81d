"""Prompts of a file that fail are told in their places, and change no other answer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_runtime.commands.run import main as run_main
from ssd_runtime.engine.output.divergence import Divergence, Kind
from ssd_runtime.sequence.session import Session
from tests.commands import Within

LONG = "long " * 600
STRICT = "{% if messages[-1]['content']|length > 99 %}{{ raise_exception('too\nlong') }}{% endif %}x"
FAILING = {"too long": "prompt NAME: .* 512", "refused": r"prompt NAME: .* refuses it \(too long\)", "memory": "memory"}
PLAINLY = ["--model", "model", "--strategy", "plain", "--max-new-tokens", "8", "--prompts", "failing.jsonl"]


@pytest.fixture
def failing(room: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a file in which a prompt and a conversation's second turn fail."""
    shutil.copytree(room / "model", tmp_path / "model")
    prompts = [
        {"id": "one", "category": "short", "prompt": "The river"},
        {"id": "two", "category": "long", "prompt": LONG},
        {"id": "three", "turns": ["The river", LONG, "And then?"]},
        {"id": "four", "category": "short", "prompt": "The river"},
    ]
    (tmp_path / "failing.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    prefilling = Session.prefilling

    def scarce(session: Session, ids: list[int], **more: Any) -> Any:
        return prefilling(session, ids, **more) if len(ids) < 200 else torch.empty(1 << 60, dtype=torch.uint8)

    if request.param == "refused":
        (tmp_path / "model" / "chat_template.jinja").write_text(STRICT)
    if request.param == "memory":
        monkeypatch.setattr(Session, "prefilling", scarce)
    return tmp_path


@pytest.mark.parametrize(("failing", "says"), FAILING.items(), ids=FAILING, indirect=["failing"])
def test_a_prompt_that_fails_is_reported_in_its_place(failing: Path, says: str, within: Within) -> None:
    done = within(failing, run_main, *PLAINLY, "--all-turns", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (2, "")
    *each, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["id"] for record in each] == ["one", "two", "three", "three", "four"]
    for failed, name, category in ((each[1], "two", "long"), (each[3], "three", None)):
        assert set(failed) == {"id", "category", "error"}
        assert failed["category"] == category
        assert re.fullmatch(f".*{says.replace('NAME', name)}.*", failed["error"])
    assert each[4]["token_ids"] == each[2]["token_ids"] == each[0]["token_ids"]
    total = last["summary"]
    assert (total["prompts"], total["failed"], total["new_tokens"]) == (3, 2, 24)
    assert set(total["categories"]) == {"short"}

    shown = within(failing, run_main, *PLAINLY)
    text = each[0]["text"]
    assert (shown.returncode, shown.stdout) == (2, f"{text}\n\n{text}\n{text}\n")
    assert re.fullmatch(f"error: .*{says.replace('NAME', 'two')}.*\n3 prompts, 24 tokens, .*\n", shown.stderr)


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
@pytest.mark.parametrize("compare", [False, True])
def test_a_summary_comes_even_if_every_prompt_fails(failing: Path, compare: bool, within: Within) -> None:
    (failing / "failing.jsonl").write_text(json.dumps({"prompt": LONG}))
    options = [*PLAINLY, "--compare"] if compare else PLAINLY
    done = within(failing, run_main, *options, "--json")
    assert (done.returncode, done.stderr) == (2, "")
    total = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert (total["prompts"], total["failed"], total["new_tokens"]) == (0, 1, 0)
    ratios = ["tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"]
    compared = ["plain_tokens_per_second", "speedup", "identical", "divergence"]
    assert {total[name] for name in [*ratios, *(compared if compare else [])]} == {None}
    assert within(failing, run_main, *options).returncode == 2


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
def test_a_wrong_output_outweighs_a_prompt_that_fails(
    failing: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setattr("ssd_runtime.engine.offline.runner.compare", lambda **_: Divergence(Kind.ERROR, 0))
    done = within(failing, run_main, *PLAINLY, "--compare")
    assert done.returncode == 1
    assert "error: prompt two: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: an output differs from plain decoding")


@pytest.mark.parametrize("failing", ["too long"], indirect=True)
@pytest.mark.parametrize("sampled", [[], ["--temperature", "0.9", "--seed", "5"]], ids=["greedy", "sampled"])
def test_several_prompts_at_once_are_answered_as_one_by_one(failing: Path, sampled: list[str], within: Within) -> None:
    """In the file's order, turns, errors and seeds included."""
    options = [*PLAINLY, "--all-turns", "--json", *sampled]
    one, three = (within(failing, run_main, *options, "--concurrency", number) for number in ("1", "3"))
    assert one.returncode == three.returncode == 2
    expected, got = ([json.loads(line) for line in done.stdout.splitlines()] for done in (one, three))
    told = ("id", "turn", "category", "error", "token_ids", "text", "finish_reason", "seed")
    assert [[each.get(name) for name in told] for each in expected] == [
        [each.get(name) for name in told] for each in got
    ]
    summary = got[-1]["summary"]
    assert summary["concurrency"] == 3
    assert summary["throughput"] > 0
    assert summary["failed"] == 2
