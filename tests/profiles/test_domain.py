from __future__ import annotations

import pytest

from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.errors import UserError


@pytest.mark.parametrize("name", domain_names())
def test_every_domain_is_complete(name: str) -> None:
    domain, starter = load_domain(name), starter_set(name)
    assert domain.name == name
    assert len(starter.shots) >= domain.shots
    prompts = [domain.render(record, starter.shots) for record in starter.records]
    assert len(set(prompts)) == len(prompts) >= 24
    shown = [str(shot) for shot in starter.shots]
    assert not any(str(record) in shown for record in starter.records)


def test_shots_and_lengths_are_the_papers() -> None:
    """KNN-SSD §5.1."""
    assert {name: (load_domain(name).shots, load_domain(name).max_new_tokens) for name in ("cnn", "gsm8k")} == {
        "cnn": (1, 64),
        "gsm8k": (5, 64),
    }


def test_render_puts_shots_first() -> None:
    domain = load_domain("gsm8k")
    text = domain.render(
        {"question": "Q?", "answer": "no"}, [{"question": f"q{i}", "answer": f"a{i}"} for i in range(9)]
    )
    assert text.count("Question:") == 6
    assert text.endswith("Question: Q?\nAnswer:")
    assert "a4" in text
    assert "a5" not in text
    assert "no" not in text


def test_unknown_domains_are_named() -> None:
    with pytest.raises(UserError, match=r"cnn, gsm8k"):
        load_domain("nope")
