"""Small random models of every supported family, in fp32 on the CPU."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.models import tiny_model


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency tables and hashes of tests stay out of the user's cache."""
    monkeypatch.setenv("SSD_CACHE", str(tmp_path_factory.mktemp("cache")))
