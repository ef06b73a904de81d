"""A comparison times llama.cpp on the same file, if it is there; nothing that it does ends the comparison."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ssd_profiles.errors import UserError
from ssd_runtime.commands.run import main
from ssd_runtime.profiling.llama_bench import llama_bench
from tests.commands import Within, call_within, records
from tests.gguf_files import SIZES, save_gguf
from tests.models import tiny_model
from tests.runtime.gguf.vocabularies import byte_level

GOOD = json.dumps([{"n_prompt": 0, "n_gen": 8, "samples_ns": [500_000_000], "cpu_info": "any"}])
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> asked
cat figures
echo it failed >&2
exit "$(cat code)"
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A stand-in for llama-bench that notes what it is asked, and prints what its folder says."""
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(0o755)
    (program.parent / "figures").write_text(GOOD)
    (program.parent / "code").write_text("0")
    return program


@pytest.fixture
def compare(
    bench: Path,
    tmp_path: Path,
    made_up_latencies: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Within:
    vocabulary = byte_level("qwen2")
    tokens = vocabulary["tokenizer.ggml.tokens"]
    padding = -len(tokens) % 16
    vocabulary |= {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{number}]" for number in range(padding))],
        "tokenizer.ggml.token_type": [*vocabulary["tokenizer.ggml.token_type"], *[5] * padding],
    }
    model = tiny_model("qwen2", **{**SIZES, "vocab_size": len(tokens) + padding, "max_position_embeddings": 2048})
    save_gguf(tmp_path / "model.gguf", model, Type.Q8_0, vocabulary)
    monkeypatch.setenv("PATH", f"{bench.parent}:{os.environ['PATH']}")
    return partial(call_within, monkeypatch, capsys, tmp_path, main, "-m", "model.gguf", "-n", "8", "--compare")


def test_it_is_timed_around_our_runs_with_as_many_tokens_and_threads(
    compare: Within, bench: Path, tmp_path: Path
) -> None:
    done = compare("--raw", "ab ab")
    assert done.returncode == 0, done.stderr
    assert "llama.cpp decodes the same file plainly at 16.0 tokens/s (llama-bench, 8 tokens, 2 runs" in done.stderr
    asked = (bench.parent / "asked").read_text().splitlines()
    assert len(asked) == 2
    wanted = f"-m {tmp_path / 'model.gguf'} -t {torch.get_num_threads()} -ngl 0 -p 0 -n 8 -r 1 -o json"
    assert set(asked) <= {wanted, wanted.replace(f"{tmp_path}/", "")}


def test_the_table_of_sample_prompts_has_a_row_for_it_and_json_a_figure(
    compare: Within, bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = records(compare("--raw", "ab ab", "--json"))[-1]["summary"]
    assert summary["llama_cpp_tokens_per_second"] == 16.0
    (bench.parent / "asked").unlink()
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("ssd_runtime.commands.run_options.sys", terminal)
    table = compare("--raw").stdout
    assert re.search(r"llama.cpp +│ +8 │ +16.0 │", table), table
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if "│" in line]
    *prompts, every, _ = rows
    assert len(prompts) == 8
    assert every == ["all", str(sum(int(tokens) for _, tokens in prompts))]
    assert len((bench.parent / "asked").read_text().splitlines()) == 4, "the runs are spread over eight prompts"


@pytest.mark.parametrize(
    ("figures", "code", "says"),
    [
        (GOOD, "3", "failed with 3 (it failed)"),
        ("loading…", "0", "cannot be read"),
        ('[{"n_prompt": 0}]', "0", "cannot be read"),
        (GOOD.replace("500000000", "0"), "0", "cannot be read"),
        (GOOD.replace("500000000", "NaN"), "0", "cannot be read"),
        (GOOD.replace('"n_gen": 8', '"n_gen": 9'), "0", "other tests"),
        ("[]", "0", "other tests"),
        ("7", "0", "cannot be read"),
    ],
)
def test_one_that_fails_or_prints_nonsense_is_refused(figures: str, code: str, says: str, bench: Path) -> None:
    (bench.parent / "figures").write_text(figures)
    (bench.parent / "code").write_text(code)
    with pytest.raises(UserError, match=re.escape(says)):
        llama_bench(bench, bench, threads=1, prompts=(), new=8, repeats=1)


def test_one_that_is_refused_costs_one_line(compare: Within, bench: Path) -> None:
    (bench.parent / "code").write_text("3")
    done = compare("--raw", "ab ab")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "llama" in line]
    assert line.startswith("note: no comparison with llama.cpp: ")
    assert "failed with 3 (it failed)" in line
    assert "times as fast as plain decoding" in done.stderr
    assert len((bench.parent / "asked").read_text().splitlines()) == 1, "it is not asked again"


def test_prompts_and_new_tokens_are_told_apart(bench: Path) -> None:
    tests: list[dict[str, Any]] = [
        {"n_prompt": 4, "n_gen": 0, "samples_ns": [3_000_000_000, 1_000_000_000, 2_000_000_000]},
        {"n_prompt": 0, "n_gen": 8, "samples_ns": [4_000_000_000] * 3},
    ]
    (bench.parent / "figures").write_text(json.dumps(tests))
    found = llama_bench(bench, bench, threads=1, prompts=(4,), new=8, repeats=3)
    assert [(test.n_prompt, test.n_gen, test.seconds) for test in found] == [(4, 0, 2.0), (0, 8, 4.0)]
