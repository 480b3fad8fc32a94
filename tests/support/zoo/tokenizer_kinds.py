"""The tokenizers of the zoo: kinds that people bring, trained here on a small text. One entry of `KINDS` is one row."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.zoo.conversations import TRAINING_TEXT

VOCABULARY = 480
# As in the tokenizer.json of Llama 3 and of Qwen 2.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"

Rules = dict[str, Any]


@dataclass(frozen=True)
class TokenizerKind:
    """A kind of tokenizer, and what its checkpoint says about it."""

    name: str
    # Called once: the result is copied for every checkpoint.
    build: Callable[[], Tokenizer]
    # The special tokens by their names in `tokenizer_config.json`, e.g. `eos_token`.
    tokens: Mapping[str, str]
    # More fields of `tokenizer_config.json`.
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Edits the content of `tokenizer.json`.
    change: Callable[[Rules], object] = lambda _: None
    # How the tokens of a template are added; None: they are not, and stay plain text.
    marks: Mapping[str, bool] | None = field(default_factory=lambda: {"normalized": False})
    # Whether these stand in `tokenizer_config.json` alone.
    marks_in_config: bool = False
    # The kind that `config.json` names: transformers chooses the tokenizer's class by both.
    model_type: str = "llama"
    # Words of the refusal of such a base model; None for one that is served.
    refused: str | None = None

    def save(self, folder: Path, marks: Sequence[str], **settings: Any) -> Tokenizer:
        """Write both files, with the special tokens of a template; `settings` are more fields of the second."""
        tokenizer = Tokenizer.from_str(_trained(self.build))
        named = [AddedToken(text, special=True, normalized=False) for text in self.tokens.values()]
        tokenizer.add_special_tokens(named)
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        added = [
            AddedToken(text, special=True, **self.marks)
            for text in marks
            if self.marks is not None and text not in known
        ]
        if self.marks_in_config:
            start = tokenizer.get_vocab_size()
            settings["added_tokens_decoder"] = {
                str(start + place): token.__getstate__() | {"content": token.content}
                for place, token in enumerate(added)
            }
        else:
            tokenizer.add_special_tokens(added)
        rules: Rules = json.loads(tokenizer.to_str())
        self.change(rules)
        written = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
        written |= {**self.tokens, **self.settings, **settings}
        (folder / "tokenizer.json").write_text(json.dumps(rules, ensure_ascii=False))
        (folder / "tokenizer_config.json").write_text(json.dumps(written, ensure_ascii=False))
        return tokenizer


@cache
def _trained(build: Callable[[], Tokenizer]) -> str:
    return build().to_str()


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def _byte_level(
    pre_tokenizer: Any, normalizer: Any = None, *, trims: bool = True, **options: Any
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _train(
        tokenizer,
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_with_prefix_space() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def neox() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())


def llama3() -> Tokenizer:
    tokenizer = _byte_level(_split(LLAMA3_PATTERN), ignore_merges=True)
    tokenizer.add_special_tokens([AddedToken("<|begin_of_text|>", special=True, normalized=False)])
    first = _starts_with(tokenizer, "<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, first])
    return tokenizer


def qwen2() -> Tokenizer:
    return _byte_level(_split(QWEN2_PATTERN), normalizers.NFC(), trims=False)


def _starts_with(tokenizer: Tokenizer, bos: str) -> Any:
    number = tokenizer.token_to_id(bos)
    return processors.TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, number)],
    )


def _sentence_piece(
    normalizer: Any, pre_tokenizer: Any, specials: Sequence[str], *, strips: bool
) -> Tokenizer:
    """A BPE over whole characters with bytes for the others, as SentencePiece makes it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    # Trained on words, as SentencePiece does, even where the finished tokenizer reads the whole text at once.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + 256,
        special_tokens=[*specials, *BYTES],
        initial_alphabet=[SPACE],
        show_progress=False,
    )
    _train(tokenizer, trainer)
    rules: Rules = json.loads(tokenizer.to_str())
    rules["added_tokens"] = [one for one in rules["added_tokens"] if one["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strips)])
    return tokenizer


LLAMA2_SPECIALS = ("<unk>", "<s>", "</s>")


def llama2() -> Tokenizer:
    """As in Llama 2's file, which was converted before there was a `prepend_scheme`."""
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer = _sentence_piece(normalizers.Sequence(steps), None, LLAMA2_SPECIALS, strips=True)
    tokenizer.post_processor = _starts_with(tokenizer, "<s>")
    return tokenizer


def metaspace_first() -> Tokenizer:
    """As in Mistral's files since 0.2, and in Llama 2's after a conversion that is not legacy."""
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = _sentence_piece(None, pre_tokenizer, LLAMA2_SPECIALS, strips=True)
    tokenizer.post_processor = _starts_with(tokenizer, "<s>")
    return tokenizer


def metaspace_always() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = _sentence_piece(None, pre_tokenizer, LLAMA2_SPECIALS, strips=True)
    tokenizer.post_processor = _starts_with(tokenizer, "<s>")
    return tokenizer


def metaspace_never() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    return _sentence_piece(None, pre_tokenizer, LLAMA2_SPECIALS, strips=False)


def gemma() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    specials = ("<pad>", "<eos>", "<bos>", "<unk>")
    replaced = normalizers.Replace(" ", SPACE)
    tokenizer = _sentence_piece(replaced, pre_tokenizer, specials, strips=False)
    tokenizer.post_processor = _starts_with(tokenizer, "<bos>")
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted({letter for text in TRAINING_TEXT for letter in text} | {*string.printable})
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=letters,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def t5() -> Tokenizer:
    """White space counts as one space, and line breaks are lost."""
    tokenizer = unigram()
    always = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), always])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def with_length_limits(rules: Rules) -> None:
    """As `save_pretrained` left them after a training with padded rows."""
    rules["truncation"] = {
        "direction": "Right", "max_length": 24, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    rules["padding"] = {
        "strategy": {"Fixed": 200}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip


GPT2_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
QWEN2_TOKENS = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
LLAMA2_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
GEMMA_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
T5_TOKENS = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
BERT_TOKENS = {"unk_token": "[UNK]", "eos_token": "[SEP]", "pad_token": "[PAD]"}
NO_WORD_PIECE = "WordPiece"

KINDS = (
    TokenizerKind("gpt2", gpt2, GPT2_TOKENS),
    TokenizerKind("gpt2-prefix-space", gpt2_with_prefix_space, GPT2_TOKENS),
    TokenizerKind("neox", neox, GPT2_TOKENS),
    TokenizerKind("llama3", llama3, LLAMA3_TOKENS),
    TokenizerKind("qwen2", qwen2, QWEN2_TOKENS),
    TokenizerKind("llama2-legacy", llama2, LLAMA2_TOKENS),
    TokenizerKind("metaspace-first", metaspace_first, LLAMA2_TOKENS),
    TokenizerKind("metaspace-always", metaspace_always, LLAMA2_TOKENS),
    TokenizerKind("metaspace-never", metaspace_never, LLAMA2_TOKENS),
    TokenizerKind("gemma", gemma, GEMMA_TOKENS),
    TokenizerKind("unigram", unigram, T5_TOKENS),
    TokenizerKind("t5", t5, T5_TOKENS),
    TokenizerKind("wordpiece", word_piece, BERT_TOKENS, refused=NO_WORD_PIECE),
    # Settings of tokenizer_config.json
    TokenizerKind("adds-bos", gpt2, GPT2_TOKENS, {"add_bos_token": True}),
    TokenizerKind("adds-no-bos", llama2, LLAMA2_TOKENS, {"add_bos_token": False}),
    TokenizerKind(
        "adds-eos", llama2, LLAMA2_TOKENS, {"add_bos_token": True, "add_eos_token": True}
    ),
    TokenizerKind("cleans-up", unigram, T5_TOKENS, {"clean_up_tokenization_spaces": True}),
    TokenizerKind("cleans-up-bpe", gpt2, GPT2_TOKENS, {"clean_up_tokenization_spaces": True}),
    # Special tokens of other kinds
    TokenizerKind("rstrip", llama2, LLAMA2_TOKENS, marks={"rstrip": True, "normalized": False}),
    TokenizerKind("lstrip", qwen2, QWEN2_TOKENS, marks={"lstrip": True, "normalized": False}),
    TokenizerKind("normalized", llama2, LLAMA2_TOKENS, marks={"normalized": True}),
    TokenizerKind("normalized-nfc", qwen2, QWEN2_TOKENS, marks={"normalized": True}),
    TokenizerKind("plain-marks", gpt2, GPT2_TOKENS, marks=None),
    TokenizerKind("plain-marks-llama2", llama2, LLAMA2_TOKENS, marks=None),
    TokenizerKind("marks-in-config", qwen2, QWEN2_TOKENS, marks_in_config=True),
    # State that a file keeps
    TokenizerKind("stored-limits", qwen2, QWEN2_TOKENS, change=with_length_limits),
    # Classes that transformers builds by its own rules, whatever tokenizer.json says
    TokenizerKind("class-llama", llama2, LLAMA2_TOKENS, {"tokenizer_class": "LlamaTokenizer"}),
    TokenizerKind(
        "class-llama-legacy",
        llama2,
        LLAMA2_TOKENS,
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    ),
    TokenizerKind(
        "class-llama-bytes", llama3, LLAMA3_TOKENS, {"tokenizer_class": "LlamaTokenizerFast"}
    ),
    TokenizerKind(
        "class-qwen2",
        qwen2,
        QWEN2_TOKENS,
        {"tokenizer_class": "Qwen2Tokenizer"},
        model_type="qwen2",
    ),
    TokenizerKind(
        "class-gpt2",
        gpt2,
        {**GPT2_TOKENS, "unk_token": "<|endoftext|>"},
        {"tokenizer_class": "GPT2Tokenizer"},
    ),
    TokenizerKind(
        "class-gemma",
        gemma,
        GEMMA_TOKENS,
        {"tokenizer_class": "GemmaTokenizerFast"},
        model_type="gemma2",
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
