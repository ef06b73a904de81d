"""The claims of KnapSpec, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, SMALL, by_model, if_measured, least, on_all, over
from bench.papers.parts import CONTEXTS, REAL_CONTEXTS
from bench.papers.scoreboard import Claim, Look

REAL_LONG = tuple(f"qwen-context-{context}" for context in REAL_CONTEXTS)


def _found(look: Look, context: int) -> str:
    """The speed after a long prompt, or a dash."""
    return if_measured(lambda: f"{look(f'context-{context}', 'knapsack+warm_start=0'):.2f}")


def _real(look: Look, contender: str) -> str:
    """The speeds of the real model, from the shortest context."""
    return ", ".join(f"{look(part, contender):.2f}" for part in (REAL, *REAL_LONG))


def _attention(look: Look, context: int) -> str:
    """The share of attention among skipped blocks, or that nothing was skipped."""
    return if_measured(lambda: f"{look.number(f'attention at {context}'):.0f}%", "nothing skipped")


KNAPSPEC = (
    Claim(
        paper="KnapSpec",
        says="1.06 to 1.47 with contexts and answers of thousands of tokens (Table 2)",
        ours=lambda look: (
            f"without a bundle, 256 tokens, priced: {look('priced-knapsack', 'knapsack'):.2f} after short prompts, "
            f"{look('priced-knapsack', 'knapsack', 'planning'):.1%} of the time for searches; "
            + ", ".join(f"{_found(look, n)} after {n:,} tokens" for n in CONTEXTS)
            + f"; 1.5B after short prompts, 2,048 and 8,192 tokens: {_real(look, 'knapsack+warm_start=0')}, with the "
            f"bundle's masks {_real(look, 'knapsack')}"
        ),
        holds=(
            *least("knapsack+warm_start=0", 1.06, *(f"context-{n}" for n in CONTEXTS)),
            *least("knapsack", 1.06, "priced-knapsack", REAL),
            *least("knapsack+warm_start=0", 1.06, *REAL_LONG),
        ),
        reason="three short prompts, one prompt of each length; "
        "after 7,500 tokens its mask skips 34 sub-layers, where the bundle's skips 60",
        part=",".join((*(f"context-{n}" for n in CONTEXTS), "priced-knapsack", REAL, *REAL_LONG)),
    ),
    Claim(
        paper="KnapSpec",
        says="a search has the complexity of decoding a token (Section 3.6)",
        ours=lambda look: (
            f"{look.number('price of all'):.0f} plain steps on four tokens, {look.number('price of 8'):.0f} with "
            f"the 8 budgets that ours carries; the chosen masks then bring {look.number('later by all'):.2f} and "
            f"{look.number('later by 8'):.2f}"
        ),
        holds=(
            lambda look: look.number("price of all") <= 2.0,
            lambda look: look.number("price of 8") <= 0.05 * 64 * 2.15,
            lambda look: look.number("later by 8") >= 0.95 * look.number("later by all"),
        ),
        reason="the paper's GPU runs all budgets in the time of one, a processor pays for each; eight take under 2% "
        "of the 64 cycles until the next, and lose 3% of the speed on the tokens that follow (six prompts, replayed)",
        part="search-prices,search-states",
    ),
    Claim(
        paper="KnapSpec",
        says="KnapSpec > CLaSp > SWIFT > DEL on most data (Table 2)",
        ours=by_model("knapsack+warm_start=0", "clasp", "swift", "del"),
        holds=(
            *over("knapsack+warm_start=0", "clasp", PLANTED, REAL),
            *over("clasp", "swift", PLANTED, REAL),
            *over("swift", "del", PLANTED, REAL),
        ),
        reason="48 tokens are short for KnapSpec's search; on the planted model DEL is ahead of SWIFT, because it "
        "drafts seldom; at 1.5B it has a head after each layer to evaluate",
        part=f"{PLANTED},{REAL}",
    ),
    Claim(
        paper="KnapSpec",
        says="DEL slows down models that were not trained for exits: 0.68 to 0.99 (Table 2)",
        ours=on_all("del"),
        holds=tuple(lambda look, part=part: look(part, "del") < 1.0 for part in (PLANTED, SMALL, REAL)),  # type: ignore[misc]
        reason="none of these models was trained for exits",
        part="planted05,demo,qwen",
    ),
    Claim(
        paper="KnapSpec",
        says="TPT predicts speed better than the acceptance rate: Pearson 0.837 and 0.538 (Figure 2)",
        ours=lambda look: (
            f"{look.number('TPT'):.3f} and {look.number('agreement'):.3f} planted; "
            f"{look.number('TPT at 1.5B'):.3f} and {look.number('agreement at 1.5B'):.3f} at 1.5B, by price"
        ),
        holds=(
            lambda look: look.number("TPT") > look.number("agreement"),
            lambda look: look.number("TPT at 1.5B") > look.number("agreement at 1.5B"),
        ),
        reason="20 masks and draft lengths each, good and bad; at 1.5B the compiler's predictions are 10% off in the "
        "median, on other prompts of GSM8K",
        part="tpt,qwen-tpt",
    ),
    Claim(
        paper="KnapSpec",
        says="the longer the context, the more attention blocks are skipped (Figure 3)",
        ours=lambda look: ", ".join(f"{_attention(look, n)} at {n}" for n in (256, 2048, 8000)),
        holds=(
            lambda look: look.number("attention at 2048") > look.number("attention at 256"),
            lambda look: look.number("attention at 8000") > look.number("attention at 2048"),
        ),
        reason="attention is what gets dear; at 8,000 tokens no mask of the quarter of the latency that was allowed is "
        "expected to gain, so none is used",
        part="context-sweep",
    ),
    Claim(
        paper="KnapSpec",
        says="τ = 0.5 keeps the speed and saves 31% of the memory; more loses speed (Figure 4)",
        ours=lambda look: (
            f"the same mask at every τ; {look.number('states at 0.5'):.0f} of "
            f"{look.number('states at all'):.0f} states run at 0.5"
        ),
        holds=(
            lambda look: look.number("agreement at 0.5") >= look.number("agreement at all"),
            lambda look: look.number("states at 0.5") <= 0.9 * look.number("states at all"),
        ),
        reason="states of the planted model stay similar, so little is dropped; at most 0.8 MiB are held anyway",
        part="pruning",
    ),
)
