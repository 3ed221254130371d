"""The router's flags: refused where they cannot work, loopback by default."""

import subprocess
import sys
from typing import Any

import pytest

from kvrelay.engine.errors import ConfigError
from kvrelay.router.config import RouterConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("max_requests", 0),
        ("max_nodes", 0),
        ("max_stop_strings", -1),
        ("max_choices", 0),
        ("max_choices", 129),
        ("max_logprobs", -1),
        ("max_logprobs", 65),
        ("max_bad_words", -1),
        ("max_priority", -1),
        ("node_lease_s", 0.0),
        ("default_timeout_s", float("nan")),
        ("max_timeout_s", 1.0),
        ("bind", "0.0.0.0"),
        ("max_body_size", "much"),
        ("max_text_size", "1 PB"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}|{value}"):
        RouterConfig(**{field: value})


def test_the_default_is_loopback_and_sizes_are_bytes() -> None:
    config = RouterConfig(max_body_size="2MiB", max_text_size="1KiB")
    assert (config.bind, config.max_body_bytes, config.max_text_bytes) == ("127.0.0.1", 2**21, 1024)


def test_every_field_has_a_sentence_of_help() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvrelay.cli", "router", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for field in RouterConfig.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in shown
