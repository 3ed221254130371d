"""A chat's conversation, its commands and what was typed, without a terminal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kvrelay.cli.chat import Screen
from kvrelay.cli.chat_input import MAX_KEPT, PipedInput, append_history, read_history
from kvrelay.cli.client import Timings, Usage
from kvrelay.cli.config import ChatConfig, GenerateConfig
from kvrelay.cli.conversation import Command, Conversation, Turn, parse
from kvrelay.cli.report import one_line


def spoken(conversation: Conversation, question: str) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages(question)]


def test_what_is_sent_is_the_system_message_the_turns_and_the_question() -> None:
    conversation = Conversation(system="S", turns=[Turn("q1", "a1"), Turn("q2", "a2")])
    turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    assert spoken(conversation, "q3") == [("system", "S"), *turns, ("user", "q3")]
    conversation.system = ""
    assert spoken(conversation, "q3") == [*turns, ("user", "q3")]


def test_a_forgotten_turn_is_not_sent_but_stays_in_what_is_saved() -> None:
    conversation = Conversation(turns=[Turn("q1", "a1"), Turn("q2", "a2")])
    assert conversation.forget_oldest()
    assert spoken(conversation, "q3") == [("user", "q2"), ("assistant", "a2"), ("user", "q3")]
    assert [said["content"] for said in conversation.transcript()] == ["q1", "a1", "q2", "a2"]
    assert conversation.forget_oldest()
    assert not conversation.forget_oldest()
    assert spoken(conversation, "q3") == [("user", "q3")]


def test_taking_back_the_last_turn_leaves_no_forgotten_turn_that_is_not_there() -> None:
    conversation = Conversation(turns=[Turn("q1", "a1")])
    conversation.forget_oldest()
    assert conversation.take_back() == "q1"
    assert conversation.num_forgotten == 0
    assert conversation.take_back() is None
    conversation.turns.append(Turn("q2", "a2"))
    assert spoken(conversation, "q3")[0] == ("user", "q2")


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("hello", "hello"),
        (" /help", " /help"),
        ("//etc/hosts is what?", "/etc/hosts is what?"),
        ("/help", Command("help")),
        ("/system  Be brief. ", Command("system", "Be brief.")),
        ("/", Command("")),
    ],
)
def test_a_slash_begins_a_command_and_two_a_message(text: str, means: Command | str) -> None:
    assert parse(text) == means


def messages(*lines: str) -> list[str]:
    source: Iterator[str] = iter([f"{line}\n" for line in lines])
    piped, found = PipedInput(lambda: next(source, "")), []
    while True:
        try:
            found.append(piped.message())
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", "", "b"], ["a", "", "b"]),
        (["a\\", "b", "c"], ["a\nb", "c"]),
        (['"""a', "", "b\\", 'c"""', "d"], ["a\n\nb\\\nc", "d"]),
        (['"""', "a", '"""', "d"], ["a", "d"]),
        (['"""a"""', "d"], ["a", "d"]),
        (['"""a', "never closed"], ["a\nnever closed"]),
        (["a\\"], ["a"]),
        (['say """', "x"], ['say """', "x"]),
    ],
)
def test_lines_become_messages(lines: list[str], expected: list[str]) -> None:
    assert messages(*lines) == expected


@given(st.lists(st.text(st.characters(exclude_characters='\n\\"', exclude_categories=["Cs"]))))
def test_plain_lines_are_messages_as_they_stand(lines: list[str]) -> None:
    assert messages(*lines) == lines


def test_typed_messages_are_kept_whole_for_their_owner_alone_and_not_without_end(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    for message in ("one\ntwo", "é 界"):
        append_history(file, message)
    assert read_history(file) == ["one\ntwo", "é 界"]
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('"good"\n{"a": 1}\nnot json\n"null \\u0000"\n' + '"x"\n' * (MAX_KEPT - 1))
    assert len(read_history(file)) == MAX_KEPT - 1
    append_history(file, "y")
    append_history(file, "z")
    assert len(file.read_text().splitlines()) == MAX_KEPT // 2 + 1
    assert read_history(file)[-2:] == ["y", "z"]


def test_a_model_s_words_do_not_steer_a_terminal_but_go_unchanged_into_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "a\tb\n\x1b[2J\x07\x9b"
    for is_terminal in (True, False):
        Screen(is_terminal=is_terminal, stats=False).say(said)
    assert capsys.readouterr().out == "a\tb\n\ufffd[2J\ufffd\ufffd" + said


def test_a_dim_note_needs_a_terminal_that_has_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Screen(is_terminal=True, stats=True).note("x")
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(is_terminal=True, stats=True).note("x")
    Screen(is_terminal=False, stats=True).note("x")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("\033[2mx\033[0m\nx\n", "x\n")


def test_the_line_behind_an_answer_has_its_speed_its_wait_and_the_cache() -> None:
    names = ("route_ms", "prefill_queue_ms", "prefill_ms", "first_token_out_ms", "second_token_ms")
    more = ("exposed_transfer_ms", "decode_queue_ms", "first_decode_step_ms")
    timings = Timings(ttft_ms=30.4, total_ms=2030.4, **dict.fromkeys((*names, *more), 0.0))
    usage = Usage(prompt_tokens=70, completion_tokens=41, cached_tokens=64)
    assert one_line(usage, timings) == "41 tokens, 20.0 tokens/s, first after 30 ms (70 in, 64 cached)"


def test_a_chat_takes_generate_s_sampling_flags() -> None:
    given = {"max_tokens": 5, "top_k": 3, "seed": 7, "stop": ("x",), "ignore_eos": True}
    assert ChatConfig(**given).sampling() == {"temperature": 0.7} | given | {"stop": ["x"]}
    assert GenerateConfig(prompt=("p",), **given).sampling() == {"temperature": 0.0} | given | {"stop": ["x"]}
