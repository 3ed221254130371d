"""The LLM class: what a served request gets, in this process; its errors, its interrupts and its end."""

import gc
import io
import os
import random
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mixtures import as_form, random_request
from support.oracle import random_prompt
from support.roles import Client, Roles, wait_for

from kvrelay import LLM, InvalidPrompt, KvrelayError, RequestOutput, SamplingParams
from kvrelay.engine.errors import ConfigError, InvalidArgument, Unavailable
from kvrelay.engine.legs import MAX_LOGPROBS
from kvrelay.engine.request import Logprobs
from kvrelay.llm.llm import EngineOptions
from kvrelay.proto import inference_pb2 as pb

pytestmark = pytest.mark.slow

OPTIONS: EngineOptions = {"dtype": "float32", "threads": 1, "num_blocks": 64, "max_num_batched_tokens": 32}
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--max-num-batched-tokens", "32")
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
WORDS = ("hell", "the", "in", "an the", "on", "é")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def every_block_comes_back(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    wait_for(lambda: llm.statistics().num_live == 0 and llm.statistics().blocks.owned == 0)
    blocks = llm.statistics().blocks
    assert blocks.free + blocks.cached == blocks.total


# --- the same as served


Choice = tuple[str, list[int], list[Logprobs], str]


def said(output: RequestOutput) -> tuple[dict[int, Choice], list[Logprobs], tuple[int, ...]]:
    """Everything of an answer that is no time."""
    choices = {
        choice.index: (choice.text, list(choice.token_ids), list(choice.logprobs or ()), choice.finish_reason.value)
        for choice in output.outputs
    }
    usage = output.usage
    return choices, list(output.prompt_logprobs or ()), (usage.prompt_tokens, usage.completion_tokens)


def served(responses: list[pb.GenerateResponse]) -> tuple[dict[int, Choice], list[Logprobs], tuple[int, ...]]:
    choices: dict[int, Choice] = {}
    prompt: list[Logprobs] = []
    for response in responses:
        text, token_ids, logprobs, _ = choices.get(response.choice, ("", [], [], ""))
        found = [Logprobs(tuple(p.token_ids), tuple(p.logprobs)) for p in response.logprobs]
        prompt += [Logprobs(tuple(p.token_ids), tuple(p.logprobs)) for p in response.prompt_logprobs]
        choices[response.choice] = (
            text + response.text,
            token_ids + list(response.token_ids),
            logprobs + found,
            response.finish_reason,
        )
    usage = responses[-1].usage
    return choices, prompt, (usage.prompt_tokens, usage.completion_tokens)


def any_sampling(rng: random.Random, number: int) -> SamplingParams:
    """Every field, in any mixture; the text's own too."""
    given = random_request(rng, number).sampling
    kept = {name: getattr(given, name) for name in SamplingParams.__dataclass_fields__ if hasattr(given, name)}
    return SamplingParams(
        **kept
        | {
            "logit_bias": dict(given.logit_bias),
            "bad_words": [] if given.structured_output else rng.sample(WORDS, rng.choice([0, 0, 3])),
            "stop": rng.sample(["e", "he", "q", "Z", "0"], rng.choice([0, 0, 2])),
            "include_stop_str_in_output": rng.choice([True, False]),
            "skip_special_tokens": rng.choice([True, False]),
        }
    )


def as_message(prompt: str | list[int], params: SamplingParams) -> pb.GenerateRequest:
    given = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    given["structured_output"] = as_form(params.structured_output)
    sampling = pb.SamplingParams(**{name: value for name, value in given.items() if value is not None})
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, sampling=sampling)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def test_any_mixture_has_the_bits_that_the_served_path_gives_it(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    """Sixty prompts in the batches of one engine, and one after the other through router, prefill and decode node."""
    rng = random.Random("offline")
    texts = ["hello the inn", "the hello", "é" * 9]
    prompts: list[str | list[int]] = [
        rng.choice([*texts, random_prompt(rng.choice([1, 16, 40, 64]), seed=i)]) for i in range(60)
    ]
    params = [any_sampling(rng, i) for i in range(60)]
    outputs = llm.generate(prompts, params)
    assert any(len(output.outputs) > 1 for output in outputs)
    assert {choice.finish_reason.value for output in outputs for choice in output.outputs} == {"stop", "length"}
    roles = Roles(tiny_model, tmp_path)
    try:
        router = roles.start("router", "--port", "0")
        nodes = [roles.start(role, "--router", router.grpc, *FLAGS) for role in ("prefill", "decode")]
        client = Client(router.grpc)
        client.wait_until_paired()
        for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
            assert said(output) == served(client.stream(as_message(prompt, sampling))), (prompt, sampling)
        chat = [{"role": "user", "content": "hello"}]
        message = as_message("", SHORT)
        message.chat.messages.add(**chat[0])
        assert said(llm.chat(chat, SHORT)[0]) == served(client.stream(message))
        for node in nodes:
            node.wait_until_idle()
        client.close()
    finally:
        roles.close()


def test_streamed_pieces_add_up_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=2, logprobs=1, stop="Z")
    (output,) = llm.generate("hello the", params)
    pieces = list(llm.stream("hello the", params))
    for choice in output.outputs:
        own = [piece for piece in pieces if piece.choice == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert tuple(token_id for piece in own for token_id in piece.token_ids) == choice.token_ids
        assert tuple(entry for piece in own for entry in piece.logprobs) == choice.logprobs
        assert own[-1].finish_reason == choice.finish_reason
    assert pieces[-1].summary is not None
    assert pieces[-1].summary.usage.completion_tokens == output.usage.completion_tokens


def test_results_stand_in_the_order_of_the_prompts_and_each_has_its_own_parameters(llm: LLM) -> None:
    """Two hundred prompts, over three times the seats; the node never knows of more than twice the seats."""
    prompts = [random_prompt(1 + i % 30, seed=i) for i in range(200)]
    params = [SamplingParams(max_tokens=1 + i % 7, temperature=0, ignore_eos=True) for i in range(200)]
    most = 0

    class Bar:
        def __init__(self, **given: Any) -> None:
            assert given["total"] == 200

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool) -> None: ...

        def update(self) -> None:
            nonlocal most
            most = max(most, llm.statistics().num_live)

    outputs = llm.generate(prompts, params, Bar)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(200)]
    assert [output.request_id for output in outputs] == [str(i) for i in range(200)]
    assert 0 < most <= 2 * 64
    assert llm.generate([prompts[150]], params[150])[0].outputs == outputs[150].outputs


def test_one_prompt_many_prompts_and_none_are_all_lists(llm: LLM) -> None:
    (one,) = llm.generate("hello", SHORT)
    assert one.prompt == "hello"
    (same,) = llm.generate([one.prompt_token_ids], SHORT)
    assert (same.prompt, same.outputs) == (None, one.outputs)
    assert llm.generate([]) == []
    two = llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], SHORT)
    assert [output.prompt_token_ids for output in two] == [
        tuple(llm.tokenize([{"role": "user", "content": content}])) for content in "ab"
    ]
    assert llm.detokenize(llm.tokenize("hello the é")) == "hello the é"


def test_lower_priorities_run_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a hundred and fifty prompts is the first to run, though not all of them are inside at once."""
    executor, ran = llm._thread.resource._core.engine.executor, list[int]()
    execute = executor.execute

    def watched(scheduled: Any) -> Any:
        ran.extend(item.sequence.request.priority for item in scheduled)
        return execute(scheduled)

    monkeypatch.setattr(executor, "execute", watched)
    llm.generate([random_prompt(20, seed=i) for i in range(150)], SHORT, priority=[1] * 149 + [0])
    assert ran[0] == 0


# --- where it is used


async def test_it_works_where_an_event_loop_runs_already_as_in_a_notebook(llm: LLM) -> None:
    (output,) = llm.generate("hello", SHORT)
    assert len(output.outputs[0].token_ids) == 4
    assert [piece.token_ids for piece in llm.stream("hello", SHORT)]


def test_two_of_them_stand_in_one_process_and_the_end_of_one_is_not_the_other_s(llm: LLM, tiny_model: Path) -> None:
    expected = llm.generate("hello", SHORT)[0].outputs
    with LLM(str(tiny_model), **OPTIONS) as other:
        assert other.generate("hello", SHORT)[0].outputs == expected
        assert_idle(other)
    assert llm.generate("hello", SHORT)[0].outputs == expected


def test_threads_share_one(llm: LLM) -> None:
    expected = [llm.generate([[i, i, i]], LONG)[0].outputs for i in range(4)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([[i, i, i]], LONG)[0].outputs

    asking = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert [found[i] for i in range(4)] == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "use_tqdm", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], use_tqdm: bool, shown: bool
) -> None:
    errors = stream()
    monkeypatch.setattr("sys.stderr", errors)
    llm.generate(["hello"] * 3, SHORT, use_tqdm)
    assert ("3/3" in errors.getvalue()) == ("output tokens/s" in errors.getvalue()) == shown


# --- interrupts


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    def strike() -> None:
        wait_for(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def test_an_interrupt_ends_all_prompts_and_leaves_it_usable(llm: LLM) -> None:
    expected = llm.generate("hello", SHORT)[0].outputs
    striking = interrupt_when(lambda: llm.statistics().load.num_running > 10)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([random_prompt(20, seed=i) for i in range(1000)], LONG)
    striking.join()
    assert_idle(llm)
    assert llm.generate("hello", SHORT)[0].outputs == expected


def test_an_interrupt_while_prompts_are_checked_leaves_it_usable(llm: LLM) -> None:
    """When the caller waits for the other thread: an interrupt in a garbage collector's callback would be lost."""
    num_steps, caller = llm.statistics().num_steps, threading.get_ident()

    def waits() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[caller])
        return {"_prepare", "follow"} <= {frame.name for frame in stack}

    striking = interrupt_when(waits)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello " * 15] * 100_000, SHORT)
    striking.join()
    assert llm.statistics().num_steps == num_steps
    assert llm.generate("hello", SHORT)


def test_a_stream_that_is_left_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, num_steps, left = llm._thread.resource._core.engine.executor, 0, threading.Event()
    execute = executor.execute

    def gated(scheduled: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 5 or left.wait(60)
        return execute(scheduled)

    monkeypatch.setattr(executor, "execute", gated)
    pieces = llm.stream("hello", LONG)
    next(pieces)
    pieces.close()
    left.set()
    assert_idle(llm)
    assert num_steps <= 5


# --- errors


@pytest.mark.parametrize(
    ("prompts", "index", "said"),
    [
        (["hello", ""], 1, "must not be empty"),
        (["hello", [1, 2], [3, 331]], 2, "token ids must be in [0, 331)"),
        (["hello", 7], 1, "must be a text or a list of token ids"),
        (["hello", None], 1, "must be a text or a list of token ids"),
        ([[1], [1.5]], 1, "must be a text or a list of token ids"),
        ([1, 2, 3], 0, "must be a text or a list of token ids"),
        ([[5] * 128], 0, "the context holds 128 tokens"),
        (["hello", [5] * 126], 1, "max_tokens = 4: at most 2"),
    ],
)
def test_a_bad_prompt_is_named_before_any_runs(llm: LLM, prompts: list[Any], index: int, said: str) -> None:
    num_steps = llm.statistics().num_steps
    with pytest.raises(InvalidPrompt) as caught:
        llm.generate(prompts, SHORT)
    assert caught.value.index == index
    assert str(caught.value).startswith(f"prompts[{index}]: ")
    assert said in str(caught.value)
    assert llm.statistics().num_steps == num_steps


def test_what_could_never_fit_is_named_before_any_runs(llm: LLM, tiny_model: Path) -> None:
    num_steps = llm.statistics().num_steps
    with LLM(str(tiny_model), **OPTIONS | {"max_num_seqs": 2}) as narrow:
        with pytest.raises(InvalidPrompt, match=r"prompts\[1\]: n = 3") as caught:
            narrow.generate(["a", "b"], [SHORT, SamplingParams(n=3)])
        assert caught.value.index == 1
    assert llm.statistics().num_steps == num_steps


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("ignore_eos", 1),
        ("stop", 7),
        ("stop", ["a", 1]),
        ("stop_token_ids", "12"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_at_once(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "params", [{"temperature": -1.0}, {"top_p": 0.0}, {"logprobs": MAX_LOGPROBS + 1}, {"stop": ["x"] * 17}, {"n": 99}]
)
def test_a_parameter_out_of_its_range_is_refused_as_the_router_does(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrompt, match=next(iter(params))):
        llm.generate("hello", SamplingParams(**params))


def test_lists_that_do_not_match_the_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="sampling_params = '1 of them'"):
        llm.generate(["a", "b"], [SHORT])
    with pytest.raises(InvalidArgument, match="priority"):
        llm.generate(["a", "b"], SHORT, priority=[1])
    with pytest.raises(InvalidArgument, match="must be SamplingParams"):
        llm.generate(["a"], [{"max_tokens": 3}])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="prompts"):
        llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidPrompt, match=r"messages\[0\]"):
        llm.chat([{"role": "user"}])


def test_numbers_of_other_libraries_are_numbers(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(max_tokens=numpy.int64(4), temperature=numpy.float32(0), ignore_eos=True)
    assert type(params.max_tokens) is int
    assert llm.generate([numpy.array([5, 6, 7])], params)[0].outputs == llm.generate([[5, 6, 7]], SHORT)[0].outputs


def test_parameters_stay_what_they_were() -> None:
    given = {
        "logit_bias": {5: 1.5},
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
        "bad_words": ("c",),
        "min_p": 0.25,
        "n": 2,
    }
    assert {name: getattr(SamplingParams(**given), name) for name in given} == given


def test_one_string_is_one_stop_and_not_its_letters(llm: LLM) -> None:
    assert SamplingParams(stop="stop", bad_words="bad").stop == ("stop",)
    assert SamplingParams(stop="stop", bad_words="bad").bad_words == ("bad",)


def test_options_are_those_of_the_engine_and_wrong_ones_are_refused(tiny_model: Path) -> None:
    from typing import get_type_hints

    from kvrelay.engine.config import EngineConfig

    assert get_type_hints(EngineOptions) == {
        name: hint for name, hint in get_type_hints(EngineConfig).items() if name != "model"
    }
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="block_size"):
        LLM(str(tiny_model), block_size=0)
    with pytest.raises(TypeError, match="blocksize"):
        LLM(str(tiny_model), blocksize=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tiny_model), max_model_len=1000)
    assert threading.enumerate() == before


def test_a_step_that_fails_fails_the_call_and_no_later_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello", SHORT)[0].outputs
    executor = llm._thread.resource._core.engine.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", lambda scheduled: 1 / 0)
        with pytest.raises(KvrelayError, match="a step failed: division by zero") as caught:
            llm.generate(["hello", "the"], SHORT)
        assert caught.value.__notes__[0].startswith("prompts[")
    assert llm.generate("hello", SHORT)[0].outputs == expected


# --- the end


def test_close_gives_threads_and_memory_back_and_says_so_to_later_callers(tiny_model: Path) -> None:
    before = len(threading.enumerate())
    llm = LLM(str(tiny_model), **OPTIONS)
    runner = weakref.ref(llm._thread.resource._core.engine.executor)
    llm.generate("hello", SHORT)
    assert len(threading.enumerate()) > before
    llm.close()
    llm.close()
    assert len(threading.enumerate()) == before
    for call in (lambda: llm.generate("hello"), lambda: llm.tokenize("a"), lambda: list(llm.stream("a"))):
        with pytest.raises(Unavailable, match="this LLM is closed"):
            call()
    gc.collect()
    assert runner() is None


def test_dropping_the_last_reference_closes_it(tiny_model: Path) -> None:
    before = len(threading.enumerate())
    llm = LLM(str(tiny_model), **OPTIONS)
    runner = weakref.ref(llm._thread.resource._core.engine.executor)
    llm.generate("hello", SHORT)
    del llm
    gc.collect()
    wait_for(lambda: len(threading.enumerate()) == before)
    gc.collect()
    assert runner() is None


def test_closing_it_ends_what_other_threads_wait_for(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate([random_prompt(20, seed=i) for i in range(1000)], LONG)
        except KvrelayError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: llm.statistics().load.num_running > 5)
    llm.close()
    asking.join(60)
    assert [str(error) for error in errors] == ["this LLM was closed"]


def test_a_dead_engine_is_an_error_and_not_a_wait(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)

    def die() -> None:
        raise SystemExit("dead")

    striking = threading.Thread(
        target=lambda: (wait_for(lambda: llm.statistics().num_live > 0), llm._thread.resource._engine.post(die))
    )
    striking.start()
    with pytest.raises(KvrelayError, match="the engine thread died: SystemExit"):
        llm.generate([random_prompt(20, seed=i) for i in range(1000)], LONG)
    striking.join()
    with pytest.raises(Unavailable):
        llm.generate("hello", SHORT)
    llm.close()
