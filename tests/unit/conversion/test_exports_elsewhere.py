"""Exports are loaded by transformers, peft and llama.cpp, and answer and stop there as in the engine."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support.models.families import SHAPE
from tests.support.models.peft_adapters import trained_elsewhere
from tuneship.conversion import exporting
from tuneship.conversion.logits import ADAPTER, engine_with_adapter
from tuneship.conversion.order import GGUF_FILE, ExportOrder, ExportReport
from tuneship.conversion.side_files import text_format
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import load_tokenizer
from tuneship.serving.sequence import GenerateRequest

pytestmark = [
    pytest.mark.slow,
    # What peft says of its options, and that it asks a model of transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

MESSAGES = [{"role": "user", "content": "Chronic eczema of both hands, 17 days"}]
TURNS = (
    "{%- for message in messages %}{{ '<|go|>' + message['role'] + '\\n' + message['content'] + '<|fin|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|go|>assistant\\n' }}{%- endif %}"
)
WITH_BOS = "{{ bos_token }}" + TURNS
# As Llama 2 and Mistral have it, where the end of a turn is the end token itself.
INST = (
    "{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{%- else %}{{ ' ' + message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
# As Alpaca has it, where nothing ends an answer.
ENDLESS = (
    "{%- for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{%- endif %}"
)
SPECIALS = ["<|over|>", "<|go|>", "<|fin|>", "<|begin|>", "<|unk|>", "<|pad|>"]
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|over|>"}
ALL_TOKENS = {**PLAIN, "bos_token": "<|begin|>", "unk_token": "<|unk|>", "pad_token": "<|pad|>"}


def byte_level(folder: Path) -> None:
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "er", "ch", "Ġo", "Ġof"]
    merges = [("e", "r"), ("c", "h"), ("Ġ", "o"), ("Ġo", "f")]
    tokenizer: Any = Tokenizer(
        models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))


def shortening(folder: Path) -> None:
    byte_level(folder)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=64, pad_id=5, pad_token="<|pad|>")
    tokenizer.save(str(folder / "tokenizer.json"))


def sentence_pieces(folder: Path, *, is_legacy: bool = True) -> None:
    letters = [chr(n) for n in range(33, 127)]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        *letters,
        "▁o",
        "▁of",
    ]
    merges = [("▁", "o"), ("▁o", "f")]
    tokenizer: Any = Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    if is_legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in pieces[:3]]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def metaspace(folder: Path) -> None:
    sentence_pieces(folder, is_legacy=False)


LLAMA_2 = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "pad_token": None, "add_bos_token": True, "add_eos_token": False, "chat_template": INST,
}  # fmt: skip
NAMED = [{"name": "tool_use", "template": WITH_BOS}, {"name": "default", "template": TURNS}]
# How to make the tokenizer; its configuration; files beside it; the token that the model is made to end answers with.
Kind = tuple[Callable[[Path], None], dict[str, Any], dict[str, Any], str]
KINDS: dict[str, Kind] = {
    "few special tokens": (byte_level, PLAIN, {"chat_template.jinja": TURNS}, "<|fin|>"),
    "all special tokens": (byte_level, {**ALL_TOKENS, "chat_template": WITH_BOS}, {}, "<|fin|>"),
    "named templates": (byte_level, {**ALL_TOKENS, "chat_template": NAMED}, {}, "<|fin|>"),
    "no template": (byte_level, {**ALL_TOKENS, "bos_token": None}, {}, "<|over|>"),
    "no end of an answer": (byte_level, {**ALL_TOKENS, "chat_template": ENDLESS}, {}, "<|over|>"),
    "bos that is not there": (
        byte_level, {**PLAIN, "add_bos_token": True, "chat_template": WITH_BOS, "bos_token": None}, {}, "<|fin|>",
    ),
    "bos twice": (byte_level, {**ALL_TOKENS, "add_bos_token": True, "chat_template": WITH_BOS}, {}, "<|fin|>"),
    "several ends": (
        byte_level, {**ALL_TOKENS, "chat_template": TURNS},
        {"generation_config.json": {"eos_token_id": [4, 0], "temperature": 0.6, "top_p": 0.9}}, "<|unk|>",
    ),
    "code and saved calls": (
        shortening,
        {
            **ALL_TOKENS, "tokenizer_class": "OursTokenizer", "chat_template": TURNS,
            "auto_map": {"AutoTokenizer": ["tokenization_ours.OursTokenizer", None]},
            "extra_special_tokens": ["<|go|>"], "padding_side": "left",
        },
        {"special_tokens_map.json": {"additional_special_tokens": ["<|go|>", "<|fin|>"]}}, "<|fin|>",
    ),
    "sentence pieces": (sentence_pieces, LLAMA_2, {}, "</s>"),
    "metaspace": (metaspace, LLAMA_2, {}, "</s>"),
}  # fmt: skip
BYTE_LEVEL = [name for name, kind in KINDS.items() if kind[0] in (byte_level, shortening)]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Tuned":
    return Tuned(request.param, tmp_path_factory.mktemp("made"))


class Tuned:
    """A base model of one kind and an adapter, whose answer to `MESSAGES` ends soon; and that answer by the engine."""

    def __init__(self, kind: str, folder: Path) -> None:
        make_tokenizer, settings, files, end = KINDS[kind]
        self.kind, self.base, self.adapter = kind, folder / "base", folder / "adapter"
        self.base.mkdir()
        make_tokenizer(self.base)
        for name, content in {"tokenizer_config.json": settings, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (self.base / name).write_text(text)
        tokenizer: Any = load_tokenizer(self.base)
        self.end: int = tokenizer.token_to_id(end)
        own = {
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": tokenizer.token_to_id(settings["eos_token"]),
        }
        config = AutoConfig.for_model("llama", **{**SHAPE, **own, "pad_token_id": None})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config)
        model.generation_config = GenerationConfig()
        saved = self.base / "generation_config.json"
        kept = saved.read_text() if saved.is_file() else None
        model.save_pretrained(self.base)
        saved.unlink() if kept is None else saved.write_text(kept)
        trained_elsewhere(self.base, self.adapter)

        template = ModelTextFormat.of_base(self.base, load_tokenizer(self.base)).template
        template.save(self.adapter)
        text = template.render(MESSAGES, add_generation_prompt=True)
        self.prompt: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        # Wherever it would choose the token that it chooses sixth now, it ends the answer.
        sixth = self._answer(())[5]
        model.lm_head.weight.data[self.end] = 1.3 * model.lm_head.weight.data[sixth]
        model.save_pretrained(self.base)
        saved.unlink() if kept is None else saved.write_text(kept)
        self.stops = text_format(self.base, template).stop_tokens
        self.answer = self._answer(self.stops)
        self.text: str = tokenizer.decode(self.answer, skip_special_tokens=False)

    def _answer(self, stops: tuple[int, ...]) -> list[int]:
        engine = engine_with_adapter(self.base, self.adapter)
        engine.submit("a", GenerateRequest(tuple(self.prompt), 20, ADAPTER, stop_tokens=stops))
        answer: list[int] = []
        while not engine.idle:
            answer += [token for _, token in engine.step().tokens]
        return answer

    def exported(self, folder: Path, kind: str) -> tuple[ExportReport, Path]:
        target = folder / "target"
        target.mkdir()
        order = ExportOrder(
            str(self.base), str(self.adapter), str(target), kind, "f16", "base", "name"
        )
        order.write(folder / "order.json")
        assert exporting.main(str(folder / "order.json"), str(folder / "report.json")) == 0
        return ExportReport.read(folder / "report.json"), target


@pytest.mark.parametrize("kind", ["peft", "merged"])
def test_transformers_and_peft_read_answer_and_stop_as_the_engine_does(
    made: Tuned, tmp_path: Path, kind: str
) -> None:
    report, target = made.exported(tmp_path, kind)
    assert report.fault is None
    assert made.end in made.stops
    assert len(made.answer) < 20
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    read = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    assert read["input_ids"] == made.prompt
    model: Any
    if kind == "peft":
        model = AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, str(target))
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    # A merged model has it already.
    settings = GenerationConfig.from_pretrained(target)
    written = model.generate(
        input_ids=torch.tensor([made.prompt]), generation_config=settings, do_sample=False, max_new_tokens=20
    )  # fmt: skip
    if kind == "merged":
        assert model.generation_config.eos_token_id == settings.eos_token_id
    assert written[0, len(made.prompt) :].tolist() == [*made.answer, made.end]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert "" not in json.loads((target / name).read_text()).values()
    rules = json.loads((target / "tokenizer.json").read_text())
    assert (rules["truncation"], rules["padding"]) == (None, None)


def test_llama_cpp_reads_answers_and_stops_as_the_engine_does(made: Tuned, tmp_path: Path) -> None:
    report, target = made.exported(tmp_path, "gguf")
    if made.kind not in BYTE_LEVEL:
        assert report.fault == "its tokenizer is not one of those that are written as GGUF files"
        return
    assert report.fault is None
    xllamacpp: Any = import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path = str(target / GGUF_FILE)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 128, 1, False, 0
    params.cpuparams.n_threads = 1
    request = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    answer = xllamacpp.Server(params).handle_chat_completions(request)
    [choice] = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == len(made.prompt)
    assert choice["finish_reason"] == "stop"
    # The end is counted, too.
    assert answer["usage"]["completion_tokens"] == len(made.answer) + 1
    assert choice["message"]["content"].strip() == made.text.strip()
