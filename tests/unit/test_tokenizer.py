"""Prompts to token ids: BOS once, chat templates, broken model folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import BOS, byte_fallback, byte_level, write_model_folder

from kvrelay.engine.errors import InvalidArgument, ModelError
from kvrelay.router.api import ChatMessage
from kvrelay.router.tokenizer import Tokenizer


def load(folder: Path, tokenizer: Any = None, **config: Any) -> Tokenizer:
    return Tokenizer.load(write_model_folder(folder, tokenizer, tokenizer_config=config))


async def test_a_completion_has_no_bos_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert await tokenizer.encode("Rome") == byte_level().encode("Rome").ids
    assert await tokenizer.encode("") == []


@pytest.mark.parametrize("text", ["Rome", f"{BOS}Rome"])
async def test_a_completion_has_bos_once(tmp_path: Path, text: str) -> None:
    """C11: also where the text spells it already, as a rendered template does."""
    plain = byte_level().encode("Rome").ids
    by_post_processor = load(tmp_path / "a", byte_level(adds_bos=True))
    by_config = load(tmp_path / "b", add_bos_token=True)
    assert await by_post_processor.encode(text) == [0, *plain]
    assert await by_config.encode(text) == [0, *plain]


async def test_a_chat_has_the_bos_of_its_template_and_no_other(tmp_path: Path) -> None:
    """C11."""
    tokenizer = load(tmp_path, byte_level(adds_bos=True))
    token_ids = await tokenizer.encode_chat([ChatMessage("user", "Rome?")])
    rendered = "<s>[user]Rome?</s>[assistant]"
    assert token_ids == byte_level().encode(rendered, add_special_tokens=False).ids
    assert token_ids == await tokenizer.encode(rendered)
    assert token_ids.count(0) == 1


async def test_long_prompts_are_tokenised_alike_on_a_thread(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    text = "Where is Rome? " * 1000
    assert await tokenizer.encode(text) == byte_level().encode(text).ids
    chat = await tokenizer.encode_chat([ChatMessage("user", text)])
    assert chat == byte_level().encode(f"<s>[user]{text}</s>[assistant]", add_special_tokens=False).ids


async def test_a_tokenizers_own_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    library = byte_fallback().from_str(byte_fallback().to_str())
    library.enable_truncation(2)
    library.enable_padding(length=9)
    tokenizer = load(tmp_path, library)
    assert await tokenizer.encode("Paris the") == byte_fallback().encode("Paris the").ids


async def test_a_template_error_is_the_clients_mistake_in_the_templates_words(tmp_path: Path) -> None:
    """D06: and the next chat is rendered as if nothing had happened."""
    tokenizer = load(tmp_path)
    good = [ChatMessage("user", "a")]
    before = await tokenizer.encode_chat(good)
    with pytest.raises(InvalidArgument, match="unknown role wizard"):
        await tokenizer.encode_chat([*good, ChatMessage("wizard", "b")])
    assert await tokenizer.encode_chat(good) == before


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ messages.foo.bar }}", "{{ messages[0].content + 1 }}", "{{ [].pop() }}"]
)
async def test_whatever_a_template_raises_is_an_invalid_argument(tmp_path: Path, template: str) -> None:
    """D06. The last one is the sandbox's refusal."""
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        await load(tmp_path, chat_template=template).encode_chat([ChatMessage("user", "a")])


async def test_a_template_is_rendered_as_hugging_face_renders_it(tmp_path: Path) -> None:
    template = """\
{%- for m in messages %}
    {%- if loop.first and tools %}{{ tools }}{% endif %}
    {{ m | tojson }}
    {% generation %}{{ m.content }}{% endgeneration %}
{% break %}
{%- endfor %}
{{ strftime_now('%Y') | length }}"""
    tokenizer = load(tmp_path, chat_template=template)
    token_ids = await tokenizer.encode_chat([ChatMessage("user", "é<")])
    assert byte_level().decode(token_ids) == '    {"role": "user", "content": "é<"}\né<4'


async def test_a_template_writes_json_with_every_option_of_hugging_faces(tmp_path: Path) -> None:
    template = "{{ {'b': 'é<', 'a': 1} | tojson(%s) }}"
    for options, expected in (
        ("", '{"b": "é<", "a": 1}'),
        ("ensure_ascii=True", '{"b": "\\u00e9<", "a": 1}'),
        ("separators=(',', ':'), sort_keys=True", '{"a":1,"b":"é<"}'),
        ("indent=1", '{\n "b": "é<",\n "a": 1\n}'),
    ):
        tokenizer = load(tmp_path, chat_template=template % options)
        assert byte_level().decode(await tokenizer.encode_chat([ChatMessage("user", "a")])) == expected


async def test_the_template_file_comes_before_the_configs_and_the_default_among_named_ones(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    tokenizer = load(tmp_path / "a", chat_template=named)
    assert byte_level().decode(await tokenizer.encode_chat([ChatMessage("user", "a")])) == "named"
    (tmp_path / "a" / "chat_template.jinja").write_text("file")
    tokenizer = load(tmp_path / "a", chat_template=named)
    assert byte_level().decode(await tokenizer.encode_chat([ChatMessage("user", "a")])) == "file"


async def test_a_model_without_a_template_refuses_chat_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        await load(tmp_path, chat_template=None).encode_chat([ChatMessage("user", "a")])


@pytest.mark.parametrize("broken", ["{", "[]", '{"model": 1}', None])
def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path, broken: str | None) -> None:
    info = write_model_folder(tmp_path)
    if broken is None:
        (tmp_path / "tokenizer.json").unlink()
    else:
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(info)


def test_a_broken_template_or_config_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template"):
        load(tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelError, match="chat_template"):
        load(tmp_path, chat_template=7)
    info = write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="expected a JSON object"):
        Tokenizer.load(info)
