"""The project's shared prompts, which measurements take by default."""

from __future__ import annotations

from pathlib import Path

DATA = Path("../shared/data")
SPEC_BENCH = DATA / "spec_bench" / "dev.jsonl"
POOLS = {"gsm8k": DATA / "gsm8k" / "test.jsonl", "humaneval": DATA / "humaneval" / "HumanEval.jsonl"}
"""Prompts of one domain each."""
