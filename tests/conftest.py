"""What many tests start from."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as on a node; to be set before torch is loaded

from collections.abc import Iterator
from pathlib import Path

# Triton's kernels run in its interpreter here. It has to know before anything imports it, and transformers does.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from support.oracle import Oracle
from support.pair import MakePair, making_pairs
from support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model: float32, context limit 128."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model: Path) -> Iterator[Oracle]:
    """What one engine by itself makes of the tiny model."""
    oracle = Oracle(tiny_model)
    yield oracle
    oracle.close()


@pytest.fixture
def make_pair(tiny_model: Path) -> Iterator[MakePair]:
    """Pairs of nodes with small blocks and chunks; at the end of the test every block is back."""
    with making_pairs(tiny_model) as make:
        yield make
