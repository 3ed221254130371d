"""Text through router, prefill node and decode node, as processes: whole characters, stop strings, limits, usage.

A bias makes the model say the bytes of a text one after another: each is likelier than the next, until the penalty
on what was said takes it away. What comes after them is the model's own: often no text at all, to its tokenizer.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

import pytest
from support.oracle import Oracle
from support.roles import Client, Roles
from support.tiny_tokenizers import byte_fallback
from tokenizers import Tokenizer

from kvrelay.engine.pieces import byte_level_alphabet
from kvrelay.proto import inference_pb2

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64")
CHARACTER_OF = {byte: character for character, byte in byte_level_alphabet().items()}
UNKNOWN = 330  # to the tokenizer: the model has more logits than it has tokens


@dataclass(frozen=True)
class Said:
    """One answer, joined; it had exactly one finish, at its end, and usage that agrees with its tokens."""

    text: str
    token_ids: list[int]
    finish_reason: str


class Served:
    """A router over one model, with its nodes."""

    def __init__(self, roles: Roles, tokenizer: Tokenizer, *nodes: str) -> None:
        self.tokenizer = tokenizer
        self.router = roles.start("router", "--port", "0")
        self.nodes = [roles.start(role, "--router", self.router.grpc, *FLAGS) for role in nodes]
        self.client = Client(self.router.grpc)
        self.client.wait_until_paired(prefill=nodes.count("prefill"))

    def say(self, prompt: str | list[int], *, stream: bool = True, **sampling: Any) -> Said:
        """Greedy, past any EOS, unless told otherwise."""
        request = inference_pb2.GenerateRequest(
            sampling=inference_pb2.SamplingParams(**{"temperature": 0, "ignore_eos": True} | sampling), stream=stream
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        responses = self.client.stream(request)
        token_ids: list[int] = []
        for response in responses:
            assert response.first_token_index == len(token_ids) or not response.token_ids
            token_ids += response.token_ids
        assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]
        assert len(responses) == 1 or stream
        assert responses[-1].usage.completion_tokens == len(token_ids)
        return Said("".join(response.text for response in responses), token_ids, responses[-1].finish_reason)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)


def serve(model: Path, folder: Path, *nodes: str) -> Iterator[Served]:
    roles = Roles(model, folder)
    try:
        served = Served(roles, Tokenizer.from_file(str(model / "tokenizer.json")), *nodes)
        yield served
        for node in served.nodes:
            node.wait_until_idle()
        served.client.close()
    finally:
        roles.close()


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tiny_model, tmp_path_factory.mktemp("logs"), "prefill", "decode")


@pytest.fixture(scope="module")
def sentencepiece(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same weights under a tokenizer with BOS, "▁" and byte tokens; the decode node alone."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "sentencepiece")
    byte_fallback().save(str(folder / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    yield from serve(folder, tmp_path_factory.mktemp("logs"), "decode")


def one_after_another(token_ids: list[int]) -> dict[str, Any]:
    """The parameters that make a greedy model say different tokens in this order."""
    assert len(set(token_ids)) == len(token_ids) <= 7
    bias = {token_id: 100 - 14 * i for i, token_id in enumerate(token_ids)}
    return {"logit_bias": bias, "repetition_penalty": 100.0}


def ids_of(served: Served, text: str) -> list[int]:
    """One token a byte."""
    return [served.tokenizer.token_to_id(CHARACTER_OF[value]) for value in text.encode()]


def letters_only(served: Served) -> dict[int, float]:
    """The bias that makes every token one of letters."""
    vocabulary = served.tokenizer.get_vocab(with_added_tokens=False)
    return {token_id: 100.0 for token, token_id in vocabulary.items() if set(token) <= {*ascii_letters, "Ġ"}}


@pytest.mark.parametrize("text", ["😀", "ไ", "𠮷", "é", "e\u0301", "😀ไ", "語é"])
def test_a_character_of_several_tokens_comes_whole(tiny: Served, text: str) -> None:
    """C02: its first token is the prefill node's, the others the decode node's."""
    token_ids = ids_of(tiny, text)
    said = tiny.say([40, 41], max_tokens=len(token_ids) + 6, **one_after_another(token_ids))
    assert said.token_ids[: len(token_ids)] == token_ids
    assert said.text.startswith(text)
    assert said.text == tiny.decode(said.token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
def test_a_limit_that_cuts_a_character_ends_the_text_with_one_mark(tiny: Served, limit: int, stream: bool) -> None:
    """C03, D08: the mark comes with the finish."""
    token_ids = ids_of(tiny, "😀ไ")
    said = tiny.say([40, 41], stream=stream, max_tokens=limit, **one_after_another(token_ids))
    whole = "😀" * (limit >= 4) + "ไ" * (limit == 7)
    assert said == Said(whole + "\ufffd" * (limit not in (4, 7)), token_ids[:limit], "length")


def test_whatever_bytes_a_model_says_the_text_is_that_of_all_its_tokens(tiny: Served) -> None:
    """A14, C02, C03."""
    bias = dict.fromkeys(ids_of(tiny, "ไ😀語"), 100.0)
    texts = set()
    for seed in range(12):
        said = tiny.say([40, 41], max_tokens=24, temperature=1, seed=seed, logit_bias=bias)
        assert said.text == tiny.decode(said.token_ids)
        assert (len(said.token_ids), said.finish_reason) == (24, "length")
        texts.add(said.text)
    assert len(texts) > 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_a_limited_text_is_that_of_one_engines_tokens(
    tiny: Served, tiny_oracle: Oracle, num_tokens: int, stream: bool
) -> None:
    """A13, D08."""
    prompt = list(range(20))
    expected = tiny_oracle.generate(prompt, max_tokens=num_tokens, ignore_eos=True)
    said = tiny.say(prompt, stream=stream, max_tokens=num_tokens)
    assert said == Said(tiny.decode(expected), expected, "length")


def test_tokens_that_show_nothing_count_and_end_once(tiny: Served) -> None:
    eos = tiny.tokenizer.token_to_id("<eos>")
    for token_id, text in ((eos, "<eos>" * 3), (UNKNOWN, "")):
        bias = {token_id: 100.0}
        assert tiny.say([40], max_tokens=3, logit_bias=bias) == Said("", [token_id] * 3, "length")
        said = tiny.say([40], max_tokens=3, logit_bias=bias, skip_special_tokens=False)
        assert said == Said(text, [token_id] * 3, "length")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_where_it_first_ends(tiny: Served, include: bool) -> None:
    """A14, D08: of the model's own text, any part may be the stop string; it costs the tokens up to its end."""
    bias = letters_only(tiny)
    whole = tiny.say([40], max_tokens=24, logit_bias=bias)
    texts = [tiny.decode([token_id]) for token_id in whole.token_ids]
    assert "".join(texts) == whole.text
    random = Random(1)
    for _ in range(16):
        start = random.randrange(len(whole.text) - 8)
        stop = whole.text[start : start + random.randint(1, 8)]
        min_tokens = random.choice([0, 0, random.randint(1, 24)])
        ends = [end for end in range(len(whole.text) + 1) if whole.text[:end].endswith(stop)]
        costs = [next(k for k in range(25) if len("".join(texts[:k])) >= end) for end in ends]
        counted = [(end, cost) for end, cost in zip(ends, costs, strict=True) if cost >= min_tokens]
        end, cost = counted[0] if counted else (len(whole.text), 24)
        expected = whole.text[: end if include or not counted else end - len(stop)]
        said = tiny.say(
            [40],
            stream=random.choice([False, True]),
            max_tokens=24,
            logit_bias=bias,
            stop=[stop, f"{stop} and on"],
            min_tokens=min_tokens,
            include_stop_str_in_output=include,
        )
        assert said == Said(expected, whole.token_ids[:cost], "stop" if counted else "length"), (stop, min_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_was_held_back_comes_with_the_finish(tiny: Served, stream: bool) -> None:
    """D08."""
    bias = letters_only(tiny)
    whole = tiny.say([40], max_tokens=9, logit_bias=bias)
    assert tiny.say([40], stream=stream, max_tokens=9, logit_bias=bias, stop=[f"{whole.text}, and on"]) == whole


@pytest.mark.parametrize("include", [False, True])
def test_the_first_tokens_text_as_stop_string_ends_the_answer_with_it(tiny: Served, include: bool) -> None:
    """A12."""
    first = tiny.say([40], max_tokens=1, logit_bias=letters_only(tiny))
    said = tiny.say(
        [40],
        max_tokens=24,
        logit_bias=letters_only(tiny),
        stop=[first.text],
        include_stop_str_in_output=include,
    )
    assert said == Said(first.text * include, first.token_ids, "stop")


def test_a_stop_string_that_a_cut_character_completes_is_the_reason(tiny: Served) -> None:
    """A14, C03: the end of the output completes it."""
    token_ids = ids_of(tiny, "a😀")[:3]
    said = tiny.say([40, 41], max_tokens=3, stop=["a\ufffd"], **one_after_another(token_ids))
    assert said == Said("", token_ids, "stop")


def test_a_sentencepiece_like_text_begins_without_a_space_and_goes_on_with_one(sentencepiece: Served) -> None:
    """C02, C11: after BOS alone the output begins the text; after a prompt it goes on."""
    the, marker = (sentencepiece.tokenizer.token_to_id(token) for token in ("▁the", "▁is"))
    emoji = [sentencepiece.tokenizer.token_to_id(f"<0x{value:02X}>") for value in "😀".encode()]
    sampling = one_after_another([the, *emoji, marker])
    for prompt, text in (("", "the😀 is"), ("Paris", " the😀 is")):
        said = sentencepiece.say(prompt, max_tokens=6, **sampling)
        assert said == Said(text, [the, *emoji, marker], "length")
    cut = sentencepiece.say("", max_tokens=3, **sampling)
    assert cut == Said("the\ufffd", [the, *emoji[:2]], "length")
