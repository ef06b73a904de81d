"""The claims of CLaSp, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, SAMPLED, both, least, over, paired, several
from bench.papers.scoreboard import Claim

SWEEP = "priced-clasp"
INTERVALS = "clasp-intervals"
CLASP = (
    Claim(
        paper="CLaSp",
        says="1.24 on LLaMA-3-8B to 1.67 on 70B, greedy (Table 1)",
        ours=lambda look: (
            f"{both('clasp')(look)}; {look(INTERVALS, 'clasp+refresh=32'):.2f} planted in 256 tokens, priced"
        ),
        holds=(
            *least("clasp", 1.24, PLANTED),
            *least("clasp", 1.24, REAL),
            *least("clasp+refresh=32", 1.24, INTERVALS),
        ),
        reason="as the paper says itself, what can be skipped shrinks with the model",
        part="planted05,demo,clasp-intervals",
    ),
    Claim(
        paper="CLaSp",
        says="CLaSp > Self-SD > SWIFT (Table 1)",
        ours=several(PLANTED, "clasp", "fixed:mix", "swift"),
        holds=(*over("clasp", "fixed:mix", PLANTED), *over("fixed:mix", "swift", PLANTED)),
        reason="Self-SD's mask is the compiler's here, which finds the planted layers; CLaSp pays for looking",
        part=PLANTED,
    ),
    Claim(
        paper="CLaSp",
        says="sampling at temperature 1 keeps 1.08 of 1.24 on LLaMA-3-8B and 1.50 of 1.67 on 70B (Table 1)",
        ours=lambda look: f"{look(SAMPLED, 'clasp'):.2f} of {look(SWEEP, 'clasp'):.2f} greedy, priced",
        holds=(
            *least("clasp", 1.08, SAMPLED),
            lambda look: look(SAMPLED, "clasp") >= 0.87 * look(SWEEP, "clasp"),
        ),
        reason="drafts take the random numbers of their positions, so they agree nearly as often as greedy ones; "
        "greedy answers had 64 tokens, sampled ones 48",
        part=f"{SWEEP},{SAMPLED}",
    ),
    Claim(
        paper="CLaSp",
        says="44 of 80 layers skipped (55%) is best; fewer and more lose (Figure 4a)",
        ours=several(SWEEP, *(f"clasp{skip}" for skip in ("+skip=0.3", "+skip=0.4", "", "+skip=0.6"))),
        holds=(
            paired("clasp", "clasp+skip=0.3", SWEEP),
            paired("clasp", "clasp+skip=0.4", SWEEP),
            paired("clasp", "clasp+skip=0.6", SWEEP),
        ),
        reason="half of the layers are planted, so a half is best by construction",
        part="priced-clasp",
    ),
    Claim(
        paper="CLaSp",
        says="searching after every verification is too dear, beyond every 128th the masks are too old (Figure 4b)",
        ours=several(INTERVALS, *(f"clasp+refresh={each}" for each in (16, 32, 64, 128))),
        holds=(
            paired("clasp+refresh=32", "clasp+refresh=16", INTERVALS),
            paired("clasp+refresh=64", "clasp+refresh=128", INTERVALS),
        ),
        reason="masks hardly age here, because what may be skipped is the model's, not the text's; three prompts of "
        "256 tokens, on which all from 32 on are within 1%",
        part=INTERVALS,
    ),
    Claim(
        paper="CLaSp",
        says="drafts that end below a confidence of 0.7 are best (Figure 4c)",
        ours=several(SWEEP, "clasp+confidence=0.4", "clasp", "clasp+confidence=0.9"),
        holds=(
            paired("clasp", "clasp+confidence=0.4", SWEEP),
            paired("clasp", "clasp+confidence=0.9", SWEEP),
        ),
        reason="where the mask doubts it is mostly right, so a lower bound drafts longer and gains 2%",
        part="priced-clasp",
    ),
    Claim(
        paper="CLaSp",
        says="masks of neighbouring tokens agree, and less the farther apart they are (Figure 3a)",
        ours=lambda look: (
            f"Jaccard {look.number('Jaccard at 1'):.2f} at distance 1, {look.number('Jaccard at 32'):.2f} at 32"
        ),
        holds=(
            lambda look: look.number("Jaccard at 1") >= 0.6,
            lambda look: look.number("Jaccard at 1") > 1.1 * look.number("Jaccard at 32"),
        ),
        reason="they agree at any distance alike, up to 32 tokens",
        part="clasp",
    ),
    Claim(
        paper="CLaSp",
        says="its programme is about as good as brute force over the 12 middle layers (Figure 3b)",
        ours=lambda look: (
            f"cosine {look.number('programme'):.3f}, best "
            f"{look.number('brute force'):.3f}, random {look.number('random'):.3f}"
        ),
        holds=(
            lambda look: look.number("programme") > look.number("random"),
            lambda look: look.number("brute force") - look.number("programme") < 0.01,
        ),
        reason="clearly better than chance; on a model without spare layers the best is some way ahead",
        part="clasp",
    ),
    Claim(
        paper="CLaSp",
        says="a search costs 1.4 verifications (0.14 and 0.10 s) in parallel, 25 one by one; 4.8% of the time "
        "(Section 5.1, Figure 3c)",
        ours=lambda look: (
            f"{look.number('CLaSp search'):.1f} plain steps measured at 60 layers; by price "
            f"{look.number('CLaSp in parallel'):.1f} at 90, and {look.number('CLaSp one by one'):.0f} one by one; "
            f"{look(PLANTED, 'clasp', 'planning'):.1%} of the time"
        ),
        holds=(
            lambda look: look.number("CLaSp search") <= 1.5,
            # The paper has 18 times.
            lambda look: look.number("CLaSp one by one") >= 9 * look.number("CLaSp in parallel"),
            lambda look: look(PLANTED, "clasp", "planning") <= 0.06,
        ),
        reason="on a processor every state costs its multiplications",
        part="planning-cost,search-prices,planted05",
    ),
)
