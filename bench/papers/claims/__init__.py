"""The claims of the five papers, read from their texts, with what has to hold in our outcomes.

Figures are the papers' own. A condition is about the same order, sign or shape; absolute speeds of other models on
other machines are conditions only where a paper states a range for all of its models.
"""

from __future__ import annotations

from bench.papers.claims.clasp import CLASP
from bench.papers.claims.knapspec import KNAPSPEC
from bench.papers.claims.knn_ssd import KNN
from bench.papers.claims.specbound import SPECBOUND
from bench.papers.claims.swift import SWIFT
from bench.papers.scoreboard import Claim

SCALE = Claim(
    paper="all",
    says="the larger the model, the more can be skipped: CLaSp 1.24 at 8B to 1.73 at 405B (Figure 5), SWIFT 7B to 70B "
    "(Figure 8b)",
    reason="no larger model is reachable, and a processor with two cores would not run it",
)
CLAIMS = (*KNN, *SWIFT, *CLASP, *KNAPSPEC, *SPECBOUND, SCALE)
