"""The claims of CLaSp, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import (
    PLANTED,
    REAL,
    REAL_SAMPLED,
    SAMPLED,
    by_model,
    least,
    on_all,
    over,
    paired,
    speeds,
    untried,
)
from bench.papers.scoreboard import Claim

SWEEP, REAL_SWEEP = "priced-clasp", "qwen-clasp"
INTERVALS, REAL_INTERVALS = "clasp-intervals", "qwen-intervals"
FEWER = "clasp+skip=0.2"
"""CLaSp with the share of layers that suits a model of 1.5B."""
CLASP = (
    Claim(
        paper="CLaSp",
        says="1.24 on LLaMA-3-8B to 1.67 on 70B, greedy (Table 1)",
        ours=lambda look: (
            f"{on_all('clasp')(look)}, with a fifth of the layers {look(REAL_SWEEP, FEWER):.2f}; "
            f"{look(INTERVALS, 'clasp+refresh=32'):.2f} planted in 256 tokens, priced"
        ),
        holds=(
            *least("clasp", 1.24, PLANTED),
            *least("clasp", 1.24, REAL),
            *least("clasp+refresh=32", 1.24, INTERVALS),
        ),
        reason="as the paper says itself, what can be skipped shrinks with the model",
        part=f"planted05,demo,qwen,{REAL_SWEEP},{INTERVALS}",
    ),
    Claim(
        paper="CLaSp",
        says="CLaSp > Self-SD > SWIFT (Table 1)",
        ours=by_model("clasp", "fixed:mix", "swift"),
        holds=(*over("clasp", "fixed:mix", PLANTED, REAL), *over("fixed:mix", "swift", PLANTED, REAL)),
        reason="Self-SD's mask is the compiler's here, which finds more than the paper's search; CLaSp pays for "
        "looking, and skips whole layers",
        part=f"{PLANTED},{REAL}",
    ),
    Claim(
        paper="CLaSp",
        says="sampling at temperature 1 keeps 1.08 of 1.24 on LLaMA-3-8B and 1.50 of 1.67 on 70B (Table 1)",
        ours=lambda look: (
            f"{look(SAMPLED, 'clasp'):.2f} of {look(SWEEP, 'clasp'):.2f} greedy planted, priced; "
            f"{look(REAL_SAMPLED, 'clasp'):.2f} of {look(REAL, 'clasp'):.2f} at 1.5B"
        ),
        holds=(
            *least("clasp", 1.08, SAMPLED),
            lambda look: look(SAMPLED, "clasp") >= 0.87 * look(SWEEP, "clasp"),
            lambda look: look(REAL_SAMPLED, "clasp") >= 0.87 * look(REAL, "clasp"),
        ),
        reason="drafts take the random numbers of their positions, so they agree nearly as often as greedy ones; "
        "greedy answers had 64 tokens, sampled ones 48",
        part=f"{SWEEP},{SAMPLED},{REAL},{REAL_SAMPLED}",
    ),
    Claim(
        paper="CLaSp",
        says="44 of 80 layers skipped (55%) is best; fewer and more lose (Figure 4a)",
        ours=lambda look: (
            "1.5B, skipping 0.1, 0.2, 0.3, 0.5: "
            + speeds(look, REAL_SWEEP, "clasp+skip=0.1", FEWER, "clasp+skip=0.3", "clasp")
            + "; planted, 0.3 to 0.6: "
            + speeds(look, SWEEP, "clasp+skip=0.3", "clasp+skip=0.4", "clasp", "clasp+skip=0.6")
        ),
        holds=(
            *(paired("clasp", f"clasp+skip={share}", SWEEP) for share in (0.3, 0.4, 0.6)),
            paired("clasp", FEWER, REAL_SWEEP),
        ),
        reason="a model of 1.5B spares a fifth of its layers; at a half the threshold ends drafts early; half of the "
        "planted model's are planted",
        part=f"{REAL_SWEEP},{SWEEP}",
    ),
    Claim(
        paper="CLaSp",
        says="searching after every verification is too dear; the longer the interval, the faster at first, and beyond "
        "128 it gets slower again (Section 5.3.2, Figure 4b)",
        ours=lambda look: (
            "every 16, 32, 64, 128: "
            + speeds(look, INTERVALS, *(f"clasp+refresh={each}" for each in (16, 32, 64, 128)))
            + " planted; "
            + speeds(look, REAL_INTERVALS, *(f"clasp+refresh={each}+skip=0.2" for each in (16, 32, 64, 128)))
            + " at 1.5B"
        ),
        holds=(untried,),
        reason="neither 1 nor more than 128 was tried, and the text orders nothing between 16 and 128; there masks "
        "hardly age on either model: the speeds differ by 4% at most, and three prompts of 256 tokens each do not tell "
        "16 from the others",
        part=f"{INTERVALS},{REAL_INTERVALS}",
    ),
    Claim(
        paper="CLaSp",
        says="drafts that end below a confidence of 0.7 are best (Figure 4c)",
        ours=lambda look: (
            "0.4, 0.7, 0.9: "
            + speeds(look, SWEEP, "clasp+confidence=0.4", "clasp", "clasp+confidence=0.9")
            + " planted; "
            + speeds(look, REAL_SWEEP, f"{FEWER}+confidence=0.4", FEWER, f"{FEWER}+confidence=0.9")
            + " at 1.5B"
        ),
        holds=tuple(
            paired(name, f"{name}+confidence={bound}", part)
            for part, name in ((SWEEP, "clasp"), (REAL_SWEEP, FEWER))
            for bound in (0.4, 0.9)
        ),
        reason="on the planted model even low-confidence drafts are mostly right; on the real model 0.4 loses much, "
        "0.7 and 0.9 are level",
        part=f"{SWEEP},{REAL_SWEEP}",
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
