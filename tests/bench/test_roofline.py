"""The roofline's figures: bytes of a step by kind, llama-bench's output, shares and ratios."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from bench.roofline import PREFILLS, REPEATS, ROWS, Side, Times, file_bytes, held_bytes, llama_bench, ratio, table
from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import dense_model, packed_model
from ssd_runtime.weights.gguf.index import GgufIndex
from tests.gguf_files import save_gguf
from tests.models import tiny_model

TIMES = Times(
    steps={1: 0.1} | {n: 0.1 + 0.01 * n for n in ROWS},
    prefills={n: n / 200 for n in PREFILLS},
)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_by_kind_are_those_of_the_matrices_that_a_step_reads(tied: bool, tmp_path: Path) -> None:
    hidden, inner, layers, vocabulary, heads, kv_heads, width = 64, 96, 3, 160, 4, 2, 32
    truth = tiny_model(
        "qwen3",
        tie_word_embeddings=tied,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
    )
    save_gguf(tmp_path / "model.gguf", truth, Type.Q8_0)
    index = GgufIndex.read(tmp_path / "model.gguf")
    config = gguf_config(index)
    numbers = {
        "attention": layers * hidden * 2 * (heads + kv_heads) * width,
        "MLP": layers * 3 * hidden * inner,
        "head": hidden * vocabulary,
    }
    assert file_bytes(index) == {kind: count * 34 // 32 for kind, count in numbers.items()}
    assert held_bytes(packed_model(index, config)[0]) == file_bytes(index)
    assert held_bytes(dense_model(index, config)) == {kind: 4 * count for kind, count in numbers.items()}


def test_times_of_llama_bench_are_read_and_its_failure_is_told(tmp_path: Path) -> None:
    rows = [
        {"n_prompt": n, "n_gen": 0, "n_depth": 0, "avg_ns": 9e9, "samples_ns": [9_000_000_000, n * 10**7, 1]}
        for n in (*ROWS, *PREFILLS)
    ]
    rows.append({"n_prompt": 0, "n_gen": 32, "n_depth": 0, "avg_ns": 1, "samples_ns": [960_000_000] * REPEATS})
    program = tmp_path / "llama-bench"
    said = tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$*" > {said}\ncat <<E\n{json.dumps(rows)}\nE\n')
    program.chmod(0o755)
    found = llama_bench(program, Path("a.gguf"), threads=3)
    assert found.steps == {1: 0.03} | {n: n / 100 for n in ROWS}
    assert found.prefills == {n: n / 100 for n in PREFILLS}
    assert said.read_text().split()[:4] == ["-m", "a.gguf", "-t", "3"]
    program.write_text("#!/bin/sh\necho first >&2; echo no such model >&2; exit 1\n")
    with pytest.raises(UserError, match=r"failed with 1 \(no such model\)"):
        llama_bench(program, Path("a.gguf"), threads=3)
    with pytest.raises(UserError, match="cannot be run"):
        llama_bench(tmp_path / "none", Path("a.gguf"), threads=3)


def test_the_table_compares_bytes_speed_and_shares_of_the_loop() -> None:
    ours = Side({"attention": 10**8, "MLP": 3 * 10**8, "head": 10**8}, [TIMES] * 3)
    slower = replace(TIMES, steps={n: 2 * each for n, each in TIMES.steps.items()})
    theirs = Side({kind: each * 8 // 10 for kind, each in ours.weights.items()}, [slower] * 3)
    rows = {name: cells for name, *cells in table(ours, theirs, [1e-10] * 3)}
    assert rows["weights per token, all, MB"] == ["500.0", "400.0", "1.250"]
    assert rows["plain step, ms"] == ["100.00", "200.00", "2.00 (2.00–2.00)"]
    assert rows["GB/s"][:2] == ["5.0", "2.0"]
    assert rows["share of the 10.0 GB/s at which a loop reads memory"][:2] == ["0.50 (0.50–0.50)", "0.20 (0.20–0.20)"]
    assert rows["prefill of 64 tokens, tokens/s"] == ["200", "200", "1.00 (1.00–1.00)"]
    assert rows["step of 8 rows ÷ plain step"][:2] == ["1.80 (1.80–1.80)"] * 2
    alone = {name: cells for name, *cells in table(ours, Side({}, []), [1e-10])}
    assert alone["plain step, ms"] == ["100.00", "", ""]
    assert alone["weights per token, MLP, MB"] == ["300.0", "", ""]


def test_an_interval_is_over_rounds_that_belong_together() -> None:
    busy = [1.0, 3.0, 2.0, 5.0]
    assert ratio([2 * each for each in busy], busy) == "2.00 (2.00–2.00)", "a slow round is slow for both"
    assert ratio([2.0, 4.0], [1.0, 2.0]) == "2.00", "two rounds make no interval"
    assert ratio([], [1.0]) == ""
