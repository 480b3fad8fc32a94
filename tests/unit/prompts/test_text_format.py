"""The end of a turn, and what stands around an answer, are read off what a template renders."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tuneship.prompts import template_budget
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.prompts.template_budget import PLAIN
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import (
    TokenizerFault,
    check_kind,
    continuation,
    encode,
    load_tokenizer,
    visible_end,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ALPACA = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content | trim + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)
TEXT_END = ALPACA.replace("| trim + '\\n\\n'", "| trim + '\\n### End\\n\\n'")
OPENS_REASONING = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
LETTERS = " \n#:[]/<>|aeghinorstuwzqAGIT1{-'.,"


def save_sentencepiece(directory: Path, *, legacy: bool = True) -> Any:
    """A tokenizer like that of Llama 2, with a token for each letter and bytes for all others."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [letter for letter in LETTERS.replace(" ", "▁") if letter not in words]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer: Any = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def format_of(
    directory: Path, template: str, *, ends: object = None, legacy: bool = True, **config: object
) -> ModelTextFormat:
    save_sentencepiece(directory, legacy=legacy)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if ends is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return ModelTextFormat.of_base(directory, load_tokenizer(directory))


def test_the_end_of_a_turn_comes_before_the_ends_of_all_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    found = format_of(tmp_path, CHATML, ends=[1, 0])
    assert found.stop_tokens == (4, 1, 0, 2)
    assert (found.stop_text, found.appended_end, found.tuning_fault) == (None, None, None)


def test_the_text_around_the_content_of_an_answer_is_known(tmp_path: Path) -> None:
    found = format_of(tmp_path, INST)
    assert (found.lead, found.pad, found.stop_tokens) == (" ", " ", (2,))


def test_a_template_without_an_end_gets_the_tokenizers_behind_each_answer(tmp_path: Path) -> None:
    found = format_of(tmp_path, ALPACA)
    assert (found.appended_end, found.stop_tokens) == ("</s>", (2,))
    turns = [{"role": role, "content": " a "} for role in ("user", "assistant", "user")]
    assert found.template.render(turns, add_generation_prompt=True) == (
        "### user:\na\n\n### assistant:\na</s>\n\n### user:\na\n\n### assistant:\n"
    )


def test_an_end_that_the_configuration_names_by_its_id_alone_is_appended(tmp_path: Path) -> None:
    found = format_of(tmp_path, ALPACA, ends=4, eos_token=None)
    assert (found.appended_end, found.stop_tokens) == ("<|im_end|>", (4,))


def test_without_any_end_the_format_says_what_to_name(tmp_path: Path) -> None:
    found = format_of(tmp_path, ALPACA, eos_token=None)
    assert "name one as eos_token" in str(found.fault)


@pytest.mark.parametrize("ends", [[None, 1], ["<|im_end|>"], "</s>", 1.0, True, [[1]], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused_by_the_files_name(
    tmp_path: Path, ends: object
) -> None:
    with pytest.raises(TokenizerFault, match=r"eos_token_id of its generation_config\.json must"):
        format_of(tmp_path, CHATML, ends=ends)


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"\xff\xfe\x00"])
def test_a_damaged_configuration_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(TokenizerFault, match=r"its generation_config\.json"):
        format_of(tmp_path, CHATML)


def test_end_tokens_that_no_model_can_have_are_left_out(tmp_path: Path) -> None:
    assert format_of(tmp_path, CHATML, ends=[-1, 2**70]).stop_tokens == (4, 2)


def test_an_end_that_is_no_token_is_a_stop_text(tmp_path: Path) -> None:
    found = format_of(tmp_path, TEXT_END)
    assert (found.stop_text, found.lead, found.pad) == ("\n### End", "", "")


def test_a_template_whose_prompt_opens_reasoning_is_served_and_not_tuned(tmp_path: Path) -> None:
    found = format_of(tmp_path, OPENS_REASONING)
    assert found.fault is None
    assert "stand before the answer" in str(found.tuning_fault)


def test_a_plain_question_that_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    found = format_of(tmp_path, "{{ raise_exception('only functions') }}")
    assert "a plain question cannot be rendered" in str(found.fault)
    assert "only functions" in str(found.fault)


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateFailed, match="none of its chat templates is named default"):
        format_of(tmp_path, [{"name": "rag", "template": CHATML}])  # type: ignore[arg-type]


@pytest.mark.parametrize("legacy", [True, False])
def test_text_behind_a_prompt_keeps_its_first_space(tmp_path: Path, legacy: bool) -> None:
    tokenizer = save_sentencepiece(tmp_path, legacy=legacy)
    whole, before = encode(tokenizer, "Great is the heat"), encode(tokenizer, "Great is")
    assert whole[: len(before)] == before
    assert continuation(tokenizer, before, whole[len(before) :]) == " the heat"
    assert continuation(tokenizer, [1], whole) == "Great is the heat"


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    stored = save_sentencepiece(tmp_path)
    stored.enable_truncation(3)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(encode(stored, "Great heat")) == 8
    assert len(encode(load_tokenizer(tmp_path), "Great heat")) == len("▁Great▁heat")


def test_a_space_of_a_byte_level_tokenizer_has_its_place_in_the_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    stored: Any = Tokenizer(models.BPE(words, []))
    stored.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trimming = processors.ByteLevel(trim_offsets=True)
    one = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    for steps in (trimming, processors.Sequence([trimming, one])):
        stored.post_processor = steps
        stored.save(str(tmp_path / "tokenizer.json"))
        encoding: Any = load_tokenizer(tmp_path).encode("a b", add_special_tokens=False)
        assert encoding.offsets == [(0, 1), (1, 2), (2, 3)]


def test_tokenizers_that_lose_text_are_refused_by_kind(tmp_path: Path) -> None:
    words: Any = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(TokenizerFault, match="of the kind WordPiece"):
        check_kind(words)
    lower: Any = save_sentencepiece(tmp_path)
    check_kind(lower)
    lower.normalizer = normalizers.Sequence([normalizers.Lowercase(), lower.normalizer])
    with pytest.raises(TokenizerFault, match="changes texts"):
        check_kind(lower)


def test_few_tokens_are_looked_at_before_an_answer_that_follows_no_text(tmp_path: Path) -> None:
    tokenizer = save_sentencepiece(tmp_path)
    assert len(visible_end(tokenizer, [1] * 5_000)) == 16
    assert visible_end(tokenizer, []) == []


def test_a_template_that_writes_very_much_is_a_fault_before_it_is_tokenized() -> None:
    class Untouched:
        """A tokenizer that nobody may ask."""

    tokenizer: Any = Untouched()
    found = ModelTextFormat(PromptTemplate("a" * 4_000_000 + CHATML, {}), tokenizer, ())
    assert found.fault is not None
    assert "too long" in found.fault


def test_a_format_is_read_with_how_its_template_writes_functions(tmp_path: Path) -> None:
    found = ModelTextFormat(PromptTemplate(CHATML, {}), save_sentencepiece(tmp_path), ())
    _ = found.stop_tokens, found.special_texts, found.normalized_special_texts
    assert not found.is_read
    found.read()
    assert found.is_read
    assert "with_tools" in vars(found.template)


def test_a_template_is_asked_for_functions_within_the_limits_of_a_plain_question() -> None:
    loops = "{% if tools %}{% for a in range(9**5) %}{% for b in range(99) %}{% endfor %}{% endfor %}{% endif %}"
    template = PromptTemplate(loops + CHATML, {})
    assert template.with_tools is not template
    assert template_budget.budget.steps <= PLAIN.steps
