"""The claims of SpecBound, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, least, over, paired, several
from bench.papers.parts import HALF
from bench.papers.parts import SPECBOUND as SPECBOUND_PARAMETERS
from bench.papers.scoreboard import Claim, not_yet

PUBLISHED = f"exit+{SPECBOUND_PARAMETERS}"
LATE = "late"
OWN = f"exit+{HALF}"
CHANGES = ("depth=0.9", "width=25", "annealing=0")
"""What SpecBound's Figure 4 removes: the bounds of depth and width, and annealing."""
SPECBOUND = (
    Claim(
        paper="SpecBound",
        says="1.93 to 2.33 on 7B and 13B, H800; 2.01 on an RTX 3090 (Tables 1 and 4)",
        ours=lambda look: (
            f"{look(LATE, OWN):.2f} where the last layers are weak; elsewhere tuned {look(PLANTED, 'exit'):.2f}, with "
            f"its own parameters {look(PLANTED, PUBLISHED):.2f}; real {look(REAL, 'exit'):.2f}"
        ),
        holds=(*least(OWN, 1.5, LATE), *least("exit", 1.5, PLANTED), *least("exit", 1.5, REAL)),
        reason="half of the late-weak model can be left out at best; SmolLM2's last layers matter, and every look at "
        "an exit costs its head",
        part="late,planted05,demo",
    ),
    Claim(
        paper="SpecBound",
        says="removing the depth bound costs most, the width bound less, annealing too (Figure 4)",
        ours=several(LATE, OWN, *(f"{OWN}+{change}" for change in CHANGES)),
        holds=(
            *over(f"{OWN}+width=25", f"{OWN}+depth=0.9", LATE),
            *(paired(OWN, f"{OWN}+{change}", LATE) for change in CHANGES),
        ),
        reason="26 prompts, priced; the bound is half of the layers, where the weak ones begin",
        part=LATE,
    ),
    Claim(
        paper="SpecBound",
        says="a moderate threshold (0.55) beats lower and higher ones (Figure 3)",
        ours=several(LATE, f"{OWN}+threshold=0.3", OWN, f"{OWN}+threshold=0.9"),
        holds=tuple(paired(OWN, f"{OWN}+threshold={threshold}", LATE) for threshold in (0.3, 0.9)),
        reason="26 prompts, priced",
        part=LATE,
    ),
    Claim(
        paper="SpecBound",
        says="no prompt of 480 is slower than plain decoding: 1.07 at least (Table 5; its text says 34% exceed 2.93, "
        "its table 13%)",
        ours=lambda look: (
            f"slowest of 26 {look(LATE, OWN, 'minimum'):.2f}, {look(LATE, OWN, 'share_below_1'):.0%} below 1"
        ),
        holds=(lambda look: look(LATE, OWN, "minimum") >= 1.0,),
        reason="on the late-weak model, priced",
        part=LATE,
    ),
    Claim(
        paper="SpecBound",
        says="sampling keeps most of it: 1.88 at temperature 1 (Table 2)",
        ours="not measured with exits",
        holds=(not_yet,),
        reason="greedy speeds were the first question",
    ),
)
