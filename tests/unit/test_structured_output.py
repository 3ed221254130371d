"""Forms of structured output: refused where they cannot be compiled; what they allow is what the text then has."""

import contextlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from support import tiny_tokenizers
from support.tiny_tokenizers import EOS, write_model_folder

from kvrelay.engine.errors import Internal, InvalidArgument, ModelError
from kvrelay.engine.pieces import Pieces
from kvrelay.engine.request import SamplingParams, StructuredKind, StructuredOutput
from kvrelay.engine.sampler import Sampler, SampleRow
from kvrelay.engine.structured_output import MAX_CHOICES, FormCompiler, OutputMatcher, check_structured_output
from kvrelay.router.tokenizer import Tokenizer

SCHEMA = '{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}},"required":["z"]}'
CHOICES = ("yes", "yes, of course", 'a "quoted" one', "two\nlines", "naïve 日本", "back\\slash", "$x.*")
KINDS = ("byte_level", "byte_fallback", "byte_level_with_added", "gemma_like", "unigram")


def form(kind: str, specification: str = "", choices: tuple[str, ...] = ()) -> StructuredOutput:
    return StructuredOutput(kind=StructuredKind(kind), specification=specification, choices=choices)


# --- what is refused


@pytest.mark.parametrize(
    "good",
    [
        form("json_object"),
        form("json_schema", SCHEMA),
        form("regex", r"[a-z]+\d{3}"),
        form("choice", choices=CHOICES),
        form("choice", choices=("a",) * MAX_CHOICES),
        form("grammar", 'start: "a" | "b" start'),
    ],
    ids=lambda good: f"{good.kind}-{good.specification[:20]}",
)
def test_a_good_form_passes(good: StructuredOutput) -> None:
    check_structured_output(good)
    compiler("byte_level").compile(good)


def _nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


BAD = [
    form("json_schema", "{"),
    form("json_schema", ""),
    form("json_schema", "true"),
    form("json_schema", '{"type":"nope"}'),
    form("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}}}'),
    form("json_schema", _nested(300)),
    form("json_schema", json.dumps({"enum": [f"x{i}" for i in range(2**17)]})),
    form("regex", "[a-z"),
    form("regex", r"(a)\1"),
    form("regex", ""),
    form("regex", "a" * 2**20),
    form("grammar", "start: missing"),
    form("choice"),
    form("choice", choices=("a", "")),
    form("choice", choices=("a",) * (MAX_CHOICES + 1)),
]


@pytest.mark.parametrize("asks_node", [False, True])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.kind}-{bad.specification[:20]}")
def test_a_bad_form_is_refused_with_its_field_by_router_and_node(bad: StructuredOutput, asks_node: bool) -> None:
    with pytest.raises(InvalidArgument) as caught:
        compiler("byte_level").compile(bad) if asks_node else check_structured_output(bad)
    assert caught.value.field == f"structured_output.{bad.kind}"
    assert len(caught.value.message) < 600


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bomb", ["(((a{1000}){1000}){1000}){1000}", "(a|aa){60000}", "(.*a.{40}){3}"])
def test_a_regex_with_huge_repeats_costs_no_more_than_the_compiler_s_limits(bomb: str) -> None:
    """It may pass or not: then a mask that is too dear is this output's error."""
    with contextlib.suppress(InvalidArgument, Internal):
        compiler("byte_level").compile(form("regex", bomb)).allowed(())


def test_checking_a_form_loads_no_torch_and_nothing_loads_the_compiler_before() -> None:
    program = """
import sys
from kvrelay.engine.request import StructuredKind, StructuredOutput
from kvrelay.router import service
from kvrelay.router.http import app
from kvrelay.engine.structured_output import check_structured_output
assert "llguidance" not in sys.modules
check_structured_output(StructuredOutput(kind=StructuredKind.REGEX, specification="a+"))
assert "llguidance" in sys.modules
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_tokenizer_that_cannot_be_read_is_the_model_s_error(tmp_path: Path) -> None:
    info = write_model_folder(tmp_path)
    (info.path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        FormCompiler(info).prepare()


# --- what is allowed


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    _FOLDERS.append(tmp_path_factory.mktemp("models"))
    yield
    _FOLDERS.clear()
    compiler.cache_clear()


_FOLDERS: list[Path] = []


def library(kind: str) -> tokenizers.Tokenizer:
    make: Callable[[], tokenizers.Tokenizer] = getattr(tiny_tokenizers, kind)
    return make()


@cache
def compiler(kind: str) -> FormCompiler:
    """For a model of one of the tiny tokenizers."""
    return FormCompiler(write_model_folder(_FOLDERS[-1] / kind, library(kind)))


def pieces(kind: str) -> Pieces:
    return Tokenizer(library(kind)).pieces


def eos_id(kind: str) -> int:
    token_id: int = library(kind).token_to_id(EOS)
    return token_id


def bits(mask: bytes) -> set[int]:
    return {8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def walk(kind: str, asked: StructuredOutput, rng: random.Random, most: int = 300) -> tuple[list[int], str, bool]:
    """Tokens drawn from what is allowed until the form or EOS says that it is the end. Returns them without EOS, their
    text, and whether it came to an end."""
    matcher, end, output = compiler(kind).compile(asked), eos_id(kind), list[int]()
    while len(output) < most:
        allowed = sorted(bits(matcher.allowed(output)))
        assert allowed, f"nothing may follow {output}"
        token_id = rng.choice(allowed)
        if token_id == end:
            return output, text_of(kind, output), True
        is_complete = matcher.completes(output, token_id)
        output.append(token_id)
        if is_complete:
            return output, text_of(kind, output), True
    return output, text_of(kind, output), False


def text_of(kind: str, token_ids: list[int]) -> str:
    return bytes_of(kind, token_ids).decode()


def bytes_of(kind: str, token_ids: list[int]) -> bytes:
    table = pieces(kind)
    return b"".join(table[token_id] for token_id in token_ids)


REGEXES = ("[a-f]{2,9}( and [g-m]{1,5})?", r"([0-9]{1,3}\.){3}[0-9]{1,3}", "(größer|naïve) *x+")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regex", REGEXES)
def test_any_output_that_ends_matches_the_regex_and_eos_is_allowed_just_where_it_does(kind: str, regex: str) -> None:
    rng, num_ended = random.Random(f"{kind}/{regex}"), 0
    for _ in range(12):
        output, text, has_ended = walk(kind, form("regex", regex), rng)
        num_ended += has_ended
        if has_ended:
            assert re.fullmatch(regex, text)
        matcher = compiler(kind).compile(form("regex", regex))
        for length in range(len(output)):
            begun = bytes_of(kind, output[:length]).decode(errors="surrogateescape")  # perhaps half a character
            assert (eos_id(kind) in bits(matcher.allowed(output[:length]))) == bool(re.fullmatch(regex, begun))
    assert num_ended


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_one_of_those_given_byte_for_byte(kind: str) -> None:
    """At each step no token is allowed that leads to none of them."""
    choices = CHOICES if kind != "unigram" else ("the naïve 日本", "Paris", "Paris is")  # it has no letter for all
    rng, asked, seen = random.Random(kind), form("choice", choices=choices), set[str]()
    for _ in range(60):
        output, text, has_ended = walk(kind, asked, rng)
        assert has_ended
        assert text in choices
        seen.add(text)
        matcher = compiler(kind).compile(asked)
        for length in range(len(output)):
            for token_id in bits(matcher.allowed(output[:length])) - {eos_id(kind)}:
                begun = bytes_of(kind, [*output[:length], token_id])
                assert any(choice.encode().startswith(begun) for choice in choices)
    assert len(seen) > 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])
def test_any_json_that_ends_has_its_schema(kind: str) -> None:
    schema = (
        '{"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":99},"s":{"type":"string",'
        '"maxLength":5},"e":{"enum":["x","yz"]},"l":{"type":"array","items":{"type":"boolean"},"maxItems":3}},'
        '"required":["n","s","e","l"],"additionalProperties":false}'
    )
    rng, num_ended = random.Random(kind), 0
    for _ in range(8):
        _, text, has_ended = walk(kind, form("json_schema", schema), rng, most=2000)
        if not has_ended:
            continue
        num_ended += 1
        said = json.loads(text)
        assert list(said) == ["n", "s", "e", "l"]
        assert 0 <= said["n"] <= 99
        assert len(said["s"]) <= 5
        assert said["e"] in ("x", "yz")
        assert all(isinstance(item, bool) for item in said["l"])
    assert num_ended


def test_what_the_vocabulary_cannot_spell_is_that_output_s_error() -> None:
    with pytest.raises(Internal, match="structured output"):
        walk("unigram", form("json_object"), random.Random(1))


def test_a_model_whose_texts_have_no_end_has_no_structured_outputs() -> None:
    info = replace(compiler("byte_level")._info, eos_token_ids=())
    with pytest.raises(ModelError, match="no token ends a text"):
        FormCompiler(info).compile(form("json_object"))


def test_space_between_json_s_tokens_comes_to_an_end() -> None:
    matcher, space = compiler("byte_level").compile(form("json_object")), library("byte_level").token_to_id("Ġ")
    output = library("byte_level").encode("{").ids
    for _ in range(100):
        if space not in bits(matcher.allowed(output)):
            break
        output.append(space)
    assert 8 < len(output) < 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_knows_each_token_as_the_text_that_a_client_gets(kind: str) -> None:
    known, table = compiler(kind)._prepared(), pieces(kind)
    special = Tokenizer(library(kind)).special_ids
    for token_id in set(range(library(kind).get_vocab_size())) - special:
        if b"\xff" not in table[token_id]:  # no text has that byte, and the compiler marks special tokens by it
            assert known.decode_bytes([token_id]) == table[token_id], library(kind).id_to_token(token_id)


# --- the same wherever it is made


@pytest.mark.parametrize("asked", [form("json_object"), form("regex", REGEXES[0]), form("choice", choices=CHOICES)])
def test_a_matcher_made_from_the_output_so_far_allows_what_the_first_one_does(asked: StructuredOutput) -> None:
    """Another node has the form and the tokens, and nothing else."""
    output, _, _ = walk("byte_level", asked, random.Random(1), most=40)
    along = compiler("byte_level").compile(asked)
    for length in range(len(output)):
        anew = compiler("byte_level").compile(asked, output[:length])
        late = compiler("byte_level").compile(asked)
        expected = along.allowed(output[:length])
        assert anew.allowed(output[:length]) == late.allowed(output[:length]) == expected


def test_a_fork_goes_its_own_way() -> None:
    asked = form("choice", choices=("abc", "abd"))
    encode = library("byte_level").encode
    matcher = compiler("byte_level").compile(asked)
    begun = encode("a").ids
    matcher.allowed(begun)
    other = matcher.fork()
    first, second = encode("b").ids + encode("c").ids, encode("b").ids + encode("d").ids
    assert matcher.completes(begun + first[:1], first[1])
    assert other.completes(begun + second[:1], second[1])


def test_tokens_that_the_form_does_not_allow_are_that_output_s_error() -> None:
    wrong = library("byte_level").encode("x").ids
    matcher = compiler("byte_level").compile(form("regex", "a+"))
    with pytest.raises(Internal, match="structured output"):
        matcher.allowed(wrong)
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        compiler("byte_level").compile(form("regex", "a+"), wrong)


def test_what_is_kept_compiled_is_bounded_and_those_of_late_stay() -> None:
    kept = FormCompiler(compiler("byte_level")._info)
    often = form("regex", "often")
    kept.compile(often)
    for i in range(200):
        kept.compile(form("regex", f"x{i}"))
        kept.compile(often)
    assert len(kept._compiled) == 64
    assert often in kept._compiled


# --- in the sampler


def sample_row(matcher: OutputMatcher | None, output: list[int], **sampling: object) -> SampleRow:
    params = SamplingParams(**{"max_tokens": 9, "seed": 1, **sampling})  # type: ignore[arg-type]
    return SampleRow(params, range(1), [5, *output], 1, matcher)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_the_form_allows_is_sampled_and_no_bias_brings_another_back(temperature: float) -> None:
    vocab_size = compiler("byte_level")._info.vocab_size
    matcher = compiler("byte_level").compile(form("regex", "[0-9]+"))
    allowed = bits(matcher.allowed(()))
    biases = tuple((token_id, 100.0) for token_id in range(vocab_size) if token_id not in allowed)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))
    row = sample_row(matcher, [], temperature=temperature, logit_bias=biases)
    ((token,),) = Sampler([eos_id("byte_level")]).sample(logits, [row])  # type: ignore[misc]
    assert token.token_id in allowed
    assert text_of("byte_level", [token.token_id]).isdigit()


def test_a_matcher_that_fails_ends_its_own_row_and_no_other() -> None:
    vocab_size = compiler("byte_level")._info.vocab_size
    wrong = library("byte_level").encode("x").ids
    failing = compiler("byte_level").compile(form("regex", "a+"))
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [sample_row(None, [7]), sample_row(failing, wrong), sample_row(None, [7], temperature=0.0)]
    alone = [Sampler([]).sample(logits[[i]], [rows[i]])[0] for i in (0, 2)]
    first, second, third = Sampler([]).sample(logits.clone(), rows)
    assert isinstance(second, Internal)
    assert [first, third] == alone
