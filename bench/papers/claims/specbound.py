"""The claims of SpecBound, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, SAMPLED, least, over, paired, several
from bench.papers.parts.comparisons import HALF
from bench.papers.parts.comparisons import SPECBOUND as SPECBOUND_PARAMETERS
from bench.papers.scoreboard import Claim

PUBLISHED = f"exit+{SPECBOUND_PARAMETERS}"
LATE, PART = "late-heads|late", "priced-exit"
"""The late-weak model with fitted heads, else by the model's own head; and the planted one."""
OWN = f"exit+{HALF}"
CHANGES = ("depth=0.9", "width=25", "annealing=0")
"""Parts that SpecBound's Figure 4 removes: the bounds of depth and width, and annealing."""
SPECBOUND = (
    Claim(
        paper="SpecBound",
        says="1.93 to 2.33 on 7B and 13B, H800; 2.01 on an RTX 3090 (Tables 1 and 4)",
        ours=lambda look: (
            f"tuned {look(PLANTED, 'exit'):.2f}, with "
            f"its own parameters {look(PLANTED, PUBLISHED):.2f}; real {look(REAL, 'exit'):.2f}"
        ),
        holds=(*least("exit", 1.5, PLANTED), *least("exit", 1.5, REAL)),
        reason="weak layers are spread over the planted model, so its last layers matter; heads have 8,000 tokens of "
        "text, the paper's 68,000 conversations",
        part="planted05,demo",
    ),
    Claim(
        paper="SpecBound",
        says="removing the depth bound costs most, the width bound less, annealing too (Figure 4)",
        ours=several(PART, PUBLISHED, *(f"{PUBLISHED}+{change}" for change in CHANGES)),
        holds=(
            *over(f"{PUBLISHED}+width=25", f"{PUBLISHED}+depth=0.9", PART),
            *(paired(PUBLISHED, f"{PUBLISHED}+{change}", PART) for change in CHANGES),
        ),
        reason="the depth bound is worth most and annealing 5%; drafts never reach eight tokens, so the width bound "
        "binds nothing; all are below 1",
        part=PART,
    ),
    Claim(
        paper="SpecBound",
        says="a moderate threshold (0.55) beats a high one (Figure 3)",
        ours=several(PART, PUBLISHED, f"{PUBLISHED}+threshold=0.9"),
        holds=(paired(PUBLISHED, f"{PUBLISHED}+threshold=0.9", PART),),
        reason="heads that are not sure are mostly wrong here, so a higher threshold drafts less and loses less",
        part=PART,
    ),
    Claim(
        paper="SpecBound",
        says="(ours) where the last half of the layers is weak, exits should gain what masks do",
        ours=several(LATE, OWN, "del", "clasp"),
        holds=(*least(OWN, 1.2, LATE), paired(OWN, "del", LATE)),
        reason="no heads were fitted: after shallow layers the model's own head is sure of wrong tokens (α 0.04), and "
        "DEL takes deep exits; masks gain on the same model",
        part="late-heads",
    ),
    Claim(
        paper="SpecBound",
        says="no prompt of 480 is slower than plain decoding: 1.07 at least (Table 5; its text says 34% exceed 2.93, "
        "its table 13%)",
        ours=lambda look: (
            f"slowest of 26 {look(LATE, OWN, 'minimum'):.2f}, {look(LATE, OWN, 'share_below_1'):.0%} below 1"
        ),
        holds=(lambda look: look(LATE, OWN, "minimum") >= 1.0,),
        reason="on the late-weak model without fitted heads, priced",
        part="late-heads",
    ),
    Claim(
        paper="SpecBound",
        says="sampling keeps most of it: 2.15 greedy, 1.88 at temperature 1 (Table 2)",
        ours=lambda look: (
            f"greedy {look(PART, PUBLISHED):.2f}, at temperature 1 {look(SAMPLED, PUBLISHED):.2f}; "
            f"tuned {look(PART, 'exit'):.2f} and {look(SAMPLED, 'exit'):.2f}"
        ),
        holds=(
            *least(PUBLISHED, 1.5, SAMPLED),
            lambda look: look(SAMPLED, PUBLISHED) >= 0.87 * look(PART, PUBLISHED),
        ),
        reason="sampling costs exits nothing here; but they do not gain on this model to begin with",
        part=f"{PART},{SAMPLED}",
    ),
)
