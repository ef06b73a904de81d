"""The claims of SWIFT, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, interval, least, on_all, over, paired, several
from bench.papers.scoreboard import Claim

STREAM, REAL_STREAM, SWEEP, UNIFORM = "swift-stream", "qwen-swift", "swift-sweep", "priced-swift"
SWIFT = (
    Claim(
        paper="SWIFT",
        says="1.3 to 1.6 on 13B to 70B (Table 2)",
        ours=on_all("swift"),
        holds=(*least("swift", 1.3, PLANTED, REAL),),
        reason="the prompts end before its search does; a random half of the sub-layers is a poor draft, and trees "
        "cost where verification is not free",
        part="planted05,demo,qwen",
    ),
    Claim(
        paper="SWIFT",
        says="α is 0.98 to 1.00 on LLaMA-2, 0.88 and more on code (Tables 2 and 3)",
        ours=lambda look: (
            f"{look(PLANTED, 'swift', 'alpha'):.2f} planted; 1.5B: "
            f"{look(REAL_STREAM, 'swift', 'alpha'):.2f} over 100 prompts, "
            f"the last ten {look.among(REAL_STREAM, 91, 100, 'swift', 'alpha'):.2f}"
        ),
        holds=(
            lambda look: look(PLANTED, "swift", "alpha") >= 0.88,
            lambda look: look(REAL_STREAM, "swift", "alpha") >= 0.88,
        ),
        reason="on the real model the search has not ended after 100 prompts: candidates of half of the sub-layers are "
        "seldom right, and α rises from 0.55 to 0.64 over the stream",
        part=f"{PLANTED},{REAL_STREAM}",
    ),
    Claim(
        paper="SWIFT",
        says="optimisation takes 0.8% of the time over 1000 instances (Figure 6)",
        ours=lambda look: (
            f"1.5B: {look(REAL_STREAM, 'swift', 'planning'):.1%} over 100 prompts of 128 tokens, priced; "
            f"{look.among(REAL_STREAM, 91, 100, 'swift', 'planning'):.1%} of the last ten; diffuse: "
            f"{look(STREAM, 'swift', 'planning'):.1%} over 60"
        ),
        holds=(
            lambda look: look(REAL_STREAM, "swift", "planning") <= 0.01,
            lambda look: look.among(REAL_STREAM, 91, 100, "swift", "planning") <= 0.01,
        ),
        reason="the search has not ended after 100 prompts, and takes a third of the time then; on the diffuse model "
        "it ends after some 25, and begins again",
        part=f"{REAL_STREAM},{STREAM}",
    ),
    Claim(
        paper="SWIFT",
        says="skipping uniformly brings 1.22 with trees of top-k candidates, 1.01 without (Figure 2a)",
        ours=several(UNIFORM, "swift+steps=0", "swift+steps=0+tree=0"),
        holds=(*least("swift+steps=0", 1.0, UNIFORM), *over("swift+steps=0", "swift+steps=0+tree=0", UNIFORM)),
        reason="every layer of SmolLM2 matters, and half of the planted model's, so uniform masks hit real layers: one "
        "draft in 400 is right, and trees only add to what is verified in vain",
        part=UNIFORM,
    ),
    Claim(
        paper="SWIFT",
        says="a smaller S or a larger β speeds up the first instances, a larger S all of many (Figure 8a)",
        ours=lambda look: "; ".join(
            f"{title} {look.among(SWEEP, 1, 10, name):.2f} and {look(SWEEP, name):.2f}"
            for title, name in (
                ("first ten prompts and all 32: S of 1000", "swift"),
                ("25", "swift+steps=25"),
                ("100", "swift+steps=100"),
                ("β of 5", "swift+bayes_interval=5"),
                ("100", "swift+bayes_interval=100"),
            )
        ),
        holds=(
            paired("swift+steps=25", "swift", SWEEP, prompts=(1, 10)),
            paired("swift+bayes_interval=100", "swift", SWEEP, prompts=(1, 10)),
            paired("swift", "swift+steps=25", SWEEP),
        ),
        reason="25 masks are searched at once and stay poor (0.57 in the last two prompts, where 1000 have 0.83 and "
        "100 have 0.85); 32 prompts are too few for 1000 to catch up",
        part="swift-sweep",
    ),
    Claim(
        paper="SWIFT",
        says="a medium skip ratio r is best, and a smaller one for a smaller model: 0.40 at 7B, 0.45 at 13B, 0.50 at "
        "70B (Figure 8b)",
        ours=lambda look: (
            f"{several(SWEEP, 'swift+skip=0.3', 'swift+skip=0.4', 'swift')(look)}; 0.4 ÷ 0.5 "
            f"{interval(look, SWEEP, 'swift+skip=0.4', 'swift')}"
        ),
        holds=(
            *over("swift+skip=0.4", "swift+skip=0.3", SWEEP),
            *over("swift+skip=0.4", "swift", SWEEP),
        ),
        reason="all three are level: masks that skip less are accepted more often and cost more; 0.5 steps down to 0.4 "
        "within the first prompts (without that, 1.02 of its speed over eight); on this model no ratio is clean, and "
        "32 prompts are searched most of the time",
        part=SWEEP,
    ),
    Claim(
        paper="SWIFT",
        says="a task's mask on another task loses: 1.47 falls to 1.01 (Figure 2b)",
        ours=lambda look: f"{look.number('own mask'):.2f} falls to {look.number('foreign mask'):.2f}, predicted",
        holds=(lambda look: look.number("own mask") > look.number("foreign mask"),),
        reason="on a model made for it",
        part="transfer",
    ),
    Claim(
        paper="SWIFT",
        says="(ours) the compiler's search should be as cheap beside Self-SD's 1000 evaluations as SWIFT's, which "
        "takes nearly 1/180 of their nearly 7.5 h for LLaMA-2-13B (text of Figure 6; Section 3.1 and Table 11)",
        ours=lambda look: (
            f"1000 evaluations would take {look.number('Self-SD seconds') / 3600:.1f} "
            f"h (extrapolated), {look.number('Self-SD times'):.0f} times the compiler's search"
        ),
        holds=(lambda look: look.number("Self-SD times") >= 100,),
        reason="it rates a mask in one parallel pass, not by timed decoding; SWIFT's own search was not compared",
        part="search-cost",
    ),
)
