"""The claims of the five papers, read from their texts, with what has to hold in our outcomes.

Figures are the papers' own. A condition is about the same order, sign or shape; absolute speeds of other models on
other machines are conditions only where a paper states a range for all of its models.
"""

from __future__ import annotations

from bench.papers.claims.clasp import CLASP
from bench.papers.claims.conditions import untried
from bench.papers.claims.knapspec import KNAPSPEC
from bench.papers.claims.knn_ssd import KNN
from bench.papers.claims.specbound import SPECBOUND
from bench.papers.claims.swift import SWIFT
from bench.papers.scoreboard import Claim

SIZES, DOMAINS = ("135M", "1.5B"), ("smollm2-domains", "qwen-domains")
SCALE = (
    Claim(
        paper="all",
        says="the larger the model, the more can be skipped: CLaSp 1.24 at 8B to 1.73 at 405B (Figure 5), SWIFT 7B to "
        "70B (Figure 8b)",
        ours=lambda look: "; ".join(
            f"{size}: {look.number(f'skipped at {size}'):.0%} of the sub-layers at 95% agreement, masks "
            f"{look(part, 'knn'):.2f}, with perfect stopping {look.number(f'perfect stopping at {size}'):.2f} predicted"
            for size, part in zip(SIZES, DOMAINS, strict=True)
        ),
        holds=(
            lambda look: look.number("skipped at 1.5B") > look.number("skipped at 135M"),
            lambda look: look(DOMAINS[1], "knn") > look(DOMAINS[0], "knn"),
            lambda look: look(DOMAINS[1], "knn") >= 1.06,
            untried,
        ),
        reason="two sizes of two families, one packed and one in fp32: sizes of one family were not tried; means of "
        "GSM8K and HumanEval, masks on other prompts of these; KnapSpec's 1B has 1.06 to 1.13",
        part=f"skipping,{','.join(DOMAINS)}",
    ),
)
CLAIMS = (*KNN, *SWIFT, *CLASP, *KNAPSPEC, *SPECBOUND, *SCALE)
