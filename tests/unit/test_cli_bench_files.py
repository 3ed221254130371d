"""Traces and conversations from files: what is read, and what is said of what cannot be."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from kvrelay.cli.bench_files import (
    MAX_TOKENS,
    Exchange,
    TracedRequest,
    parse_azure,
    parse_mooncake,
    parse_sharegpt,
    read_sharegpt,
    read_trace,
)
from kvrelay.cli.bench_workload import ListedPrompts, TracedPrompts
from kvrelay.engine.errors import ConfigError

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}


def test_a_mooncake_trace_has_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    later, plain = GOOD | {"timestamp": 4000}, {"timestamp": 1000, "input_length": 3, "output_length": 1}
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (later, GOOD, plain)) + "\n\n")
    assert read_trace(str(file)) == [
        TracedRequest(arrival_s=0.0, num_input_tokens=3, num_output_tokens=1),
        TracedRequest(arrival_s=0.5, num_input_tokens=600, num_output_tokens=7, hash_ids=(4, 9)),
        TracedRequest(arrival_s=3.0, num_input_tokens=600, num_output_tokens=7, hash_ids=(4, 9)),
    ]


def test_an_azure_trace_has_arrivals_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = ["2023-11-16 23:59:59.5000000,4808,10", "2023-11-17 00:00:01.000000+00:00,3,2"]
    file.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\r\n")
    assert read_trace(str(file)) == [
        TracedRequest(arrival_s=0.0, num_input_tokens=4808, num_output_tokens=10),
        TracedRequest(arrival_s=1.5, num_input_tokens=3, num_output_tokens=2),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, found a list"),
        (GOOD | {"timestamp": -1}, "line 2: timestamp = -1"),
        (GOOD | {"timestamp": True}, "line 2: timestamp = True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: timestamp = nan"),
        (GOOD | {"timestamp": "1"}, "line 2: timestamp = '1'"),
        (GOOD | {"input_length": 0}, r"line 2: input_length = 0: must be a whole number in \[1, "),
        (GOOD | {"input_length": MAX_TOKENS + 1}, "line 2: input_length"),
        (GOOD | {"output_length": 2.5}, "line 2: output_length = 2.5"),
        ({"timestamp": 0, "input_length": 3}, "line 2: output_length = None"),
        (GOOD | {"hash_ids": [1]}, "line 2: hash_ids: 1 of them, but 600 tokens are 2 blocks of 512"),
        (GOOD | {"hash_ids": [1, "2"]}, "line 2: hash_ids: expected a list of whole numbers"),
        (GOOD | {"hash_ids": "ab"}, "line 2: hash_ids: expected a list of whole numbers"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(row: object, said: str) -> None:
    lines = [json.dumps(GOOD), row if isinstance(row, str) else json.dumps(row)]
    with pytest.raises(ConfigError, match=f"trace x, {said}"):
        parse_mooncake(lines, "x")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "line 1: the header lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
        (["TIMESTAMP,ContextTokens", "x,1"], "line 1: the header lacks GeneratedTokens"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"], "line 2: TIMESTAMP = 'yesterday'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,x,1"], "line 2: ContextTokens = 'x'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"], "line 2: GeneratedTokens = None"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1,0"], "line 2: GeneratedTokens = 0"),
    ],
)
def test_a_malformed_row_is_named_with_its_field(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"trace x, {said}"):
        parse_azure(lines, "x")


def conversation(*turns: tuple[str, object]) -> dict[str, object]:
    return {"id": "1", "conversations": [{"from": who, "value": value} for who, value in turns]}


def test_conversations_that_begin_with_a_question_and_an_answer_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    told = [
        conversation(("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2")),
        conversation(("gpt", "a"), ("human", "q")),
        conversation(("human", "alone")),
        conversation(("human", "q"), ("gpt", "")),
        conversation(),
        conversation(("user", "q3"), ("assistant", "a3")),
    ]
    file.write_text(json.dumps(told))
    assert read_sharegpt(str(file)) == [Exchange("q1", "a1"), Exchange("q3", "a3")]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "sharegpt x: expected a list of conversations, found an object"),
        ([], "sharegpt x: no conversation begins with"),
        ([1], "conversation 0: expected an object with a list conversations"),
        ([{"conversations": {}}], "conversation 0: expected an object with a list"),
        ([conversation(("human", "q"), ("gpt", "a")), {"conversations": ["a"]}], "conversation 1, turn 0: expected an"),
        (
            [conversation(("human", "q"), ("gpt", 5))],
            "conversation 0, turn 1: value: expected a string, found a number",
        ),
        ([{"conversations": [{"value": "q"}]}], "conversation 0, turn 0: from: expected a string, found nothing"),
    ],
)
def test_a_malformed_conversation_is_named_with_its_field(told: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sharegpt(json.dumps(told), "x")


def test_a_file_that_is_not_there_or_not_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace .*none: No such file"):
        read_trace(str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="not UTF-8: byte 2"):
        read_sharegpt(str(tmp_path / "bytes"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no request in it"):
        read_trace(str(tmp_path / "empty"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "from", "value"]), inner),
    max_leaves=6,
)
ROWS = st.fixed_dictionaries({}, optional=dict.fromkeys([*GOOD, "conversations"], JSON))


@given(st.lists(st.one_of(st.text(), JSON.map(json.dumps), ROWS.map(json.dumps)), max_size=4))
@example(['{"timestamp": 1e400, "input_length": 1, "output_length": 1}'])
def test_no_line_is_anything_but_read_or_refused(lines: list[str]) -> None:
    for parse in (parse_mooncake, parse_azure):
        try:
            requests = parse(lines, "x")
        except ConfigError as error:
            assert "line " in str(error)  # noqa: PT017  either way is right
        else:
            assert all(0 < one.num_input_tokens <= MAX_TOKENS and one.arrival_s < 1e13 for one in requests)


@given(st.lists(ROWS | JSON, max_size=3).map(json.dumps) | st.text())
def test_no_conversation_is_anything_but_read_or_refused(text: str) -> None:
    try:
        assert all(one.question and one.answer for one in parse_sharegpt(text, "x"))
    except ConfigError as error:
        assert "sharegpt x" in str(error)  # noqa: PT017


@given(st.text(st.sampled_from('",\n\r\x001-:TZ+ ')))
def test_no_csv_is_anything_but_read_or_refused(text: str) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *text.splitlines()]
    try:
        parse_azure(lines, "x")
    except ConfigError as error:
        assert "line " in str(error)  # noqa: PT017


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    lengths = {"arrival_s": 0.0, "num_output_tokens": 1}
    traced = [
        TracedRequest(num_input_tokens=1000, hash_ids=(1, 2), **lengths),
        TracedRequest(num_input_tokens=700, hash_ids=(1, 3), **lengths),
        TracedRequest(num_input_tokens=700, **lengths),
    ]
    source = TracedPrompts(traced, seed=0, vocabulary=range(1000))
    first, second, third, warmup = (source.prompt(i).token_ids for i in (0, 1, 2, -3))
    assert [len(first), len(second), len(third)] == [1000, 700, 700]
    assert first[:512] == second[:512]
    assert first[512:700] != second[512:]
    assert third[:512] != first[:512]
    assert warmup[:512] != first[:512]
    assert source.prompt(0) == source.prompt(0)
    assert source.num_prompts == 3


def test_listed_prompts_come_as_they_are_and_a_warm_up_shares_nothing_with_them() -> None:
    source = ListedPrompts([((1, 2, 3), 5), ((4, 5), 6)], seed=0, vocabulary=range(10, 1000))
    assert [(source.prompt(i).token_ids, source.prompt(i).max_tokens) for i in range(2)] == [
        ((1, 2, 3), 5),
        ((4, 5), 6),
    ]
    assert len(source.prompt(-1).token_ids) == 2
    assert min(source.prompt(-1).token_ids) >= 10
