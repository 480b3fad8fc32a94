"""An export answers as the model does, in peft, transformers and llama.cpp; an adapter from peft is checked."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.families import build_family
from tests.support.models.peft_adapters import trained_elsewhere
from tests.support.objects.files import tar_of
from tuneship.conversion import exporting, importing
from tuneship.conversion.__main__ import _source_model
from tuneship.conversion.gguf_header import read_header
from tuneship.conversion.logits import engine_with_adapter
from tuneship.conversion.order import (
    GGUF_FILE,
    ExportOrder,
    ExportReport,
    ImportOrder,
    ImportReport,
    ReadingOrder,
)
from tuneship.prompts.parity import GREEDY_TOKENS, PARITY_FILE, TALKS, Parity
from tuneship.prompts.template import PromptTemplate
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.serving.adapters import AdapterRefused

pytestmark = [
    pytest.mark.slow,
    # peft asks a model of transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

TINY = SHIPPED / "tuneship-tiny"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_elsewhere(TINY, tmp_path_factory.mktemp("elsewhere") / "adapter")


def exported(tmp_path: Path, base: Path, adapter: Path, kind: str, gguf_type: str = "f16") -> Any:
    target = tmp_path / "target"
    target.mkdir()
    order = ExportOrder(
        str(base), str(adapter), str(target), kind, gguf_type, "base", "name", "mit"
    )
    order.write(tmp_path / "order.json")
    assert exporting.main(str(tmp_path / "order.json"), str(tmp_path / "report.json")) == 0
    return ExportReport.read(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("kind", "gguf_type", "number_format"),
    [
        ("peft", "f16", "float32"),
        ("merged", "f16", "float32"),
        ("gguf", "f16", "f16"),
        ("gguf", "q8_0", "q8_0"),
    ],
    ids=("peft", "merged", "f16", "q8_0"),
)
def test_an_export_answers_as_the_engine_does(
    tmp_path: Path, adapter: Path, kind: str, gguf_type: str, number_format: str
) -> None:
    report = exported(tmp_path, TINY, adapter, kind, gguf_type)
    assert report.fault is None
    assert report.number_format == number_format
    assert 0 < report.difference <= report.allowed
    target = tmp_path / "target"
    if kind == "peft":
        config = json.loads((target / CONFIG).read_text())
        assert config["base_model_name_or_path"] == "base"
        assert str(TINY) not in json.dumps(config)
    elif kind == "merged":
        assert PromptTemplate.load(target).source == PromptTemplate.load(TINY).source
        assert (target / "tokenizer.json").is_file()
    else:
        header = read_header(target / GGUF_FILE)
        matrices = {tensor.format for tensor in header.tensors if len(tensor.shape) > 1}
        assert matrices == {gguf_type.upper()}
        assert header.licence == "mit"


def test_exporting_and_reading_leave_a_gpu_alone(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica beside it has taken the memory, and the process may have no access to it."""
    for chooser in ("tuneship.training.base_model.device", "peft.peft_model.infer_device"):
        monkeypatch.setattr(chooser, lambda: torch.device("meta"))
    assert exported(tmp_path, TINY, adapter, "peft").fault is None
    found = _source_model(ReadingOrder(str(TINY), str(TINY)))
    assert {weights.device.type for weights in found.parameters()} == {"cpu"}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_each_architecture_of_a_gguf_file_keeps_its_answers(tmp_path: Path, family: str) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {**rope, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    changes = {"rope_parameters": scaled, "head_dim": 8} if family == "llama3" else {}
    base = build_family(
        tmp_path / "base", family.removesuffix("3") if changes else family, **changes
    )
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    report = exported(tmp_path, base, adapter, "gguf")
    assert report.fault is None
    assert report.difference <= report.allowed


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma", "gemma models are not written as GGUF files"),
        ("llama-with-biases", "_proj.bias has no place in a GGUF file"),
        ("mistral", "its attention has a sliding window"),
    ],
)
def test_a_model_that_llama_cpp_would_read_differently_is_refused(
    tmp_path: Path, family: str, why: str
) -> None:
    base = build_family(tmp_path / "base", family)
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    report = exported(tmp_path, base, adapter, "gguf")
    assert why in report.fault


def strip_beside(rules: dict[str, Any], _: dict[str, Any]) -> None:
    rules["added_tokens"][2]["rstrip"] = True


def whole_words(rules: dict[str, Any], _: dict[str, Any]) -> None:
    rules["model"]["ignore_merges"] = True


def more_tokens(rules: dict[str, Any], _: dict[str, Any]) -> None:
    rules["added_tokens"].append({**rules["added_tokens"][0], "id": 999, "content": "<|more|>"})


def many_ends(_: dict[str, Any], config: dict[str, Any]) -> None:
    config["eos_token_id"] = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (strip_beside, "its added token 2 is not read as llama.cpp reads tokens"),
        (whole_words, "its tokenizer is not one of those that are written"),
        (more_tokens, "its tokenizer has more tokens than its embedding"),
        (many_ends, "it has 4 end tokens, and a GGUF file has places for 3"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_differently_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], why: str
) -> None:
    base = build_family(tmp_path / "base", "llama")
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    (base / "generation_config.json").unlink()
    files = [base / name for name in ("tokenizer.json", "config.json")]
    contents = [json.loads(file.read_text()) for file in files]
    change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
    assert why in exported(tmp_path, base, adapter, "gguf").fault


def test_a_text_that_ends_answers_is_named_or_refused(tmp_path: Path) -> None:
    base = build_family(tmp_path / "base", "llama")
    turns = (
        "{%- for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n###\\n' }}{%- endfor %}"
    )
    (base / "chat_template.jinja").write_text(
        turns + "{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"
    )
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    for kind in ("merged", "gguf"):
        (tmp_path / kind).mkdir()
    assert exported(tmp_path / "merged", base, adapter, "merged").fault is None
    settings = json.loads((tmp_path / "merged" / "target" / "generation_config.json").read_text())
    assert settings["stop_strings"] == ["\n###"]
    report = exported(tmp_path / "gguf", base, adapter, "gguf")
    assert report.fault.startswith("its answers end with a text that is no token")


def test_llama_cpp_reads_the_same_tokens_and_answers_the_same(
    tmp_path: Path, adapter: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert exported(tmp_path, TINY, adapter, "gguf").fault is None
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    messages = [{"role": "user", "content": "Chronic eczema of both hands, 17 days"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()
    prompt = torch.tensor([rendered["input_ids"]])
    whole = model.generate(input_ids=prompt, max_new_tokens=16, do_sample=False)
    expected = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)

    xllamacpp: Any = import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "target" / GGUF_FILE)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 512, 1, False, 0
    params.cpuparams.n_threads = 1
    request = {"messages": messages, "max_tokens": 16, "temperature": 0}
    answer = xllamacpp.Server(params).handle_chat_completions(request)
    assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
    assert answer["choices"][0]["message"]["content"].strip() == expected.strip()


# In again


def imported(tmp_path: Path, adapter: Path) -> ImportReport:
    """Import an adapter's folder into `tmp_path / "taken"`."""
    target = tmp_path / "taken"
    target.mkdir()
    archive = tmp_path / "adapter.tar"
    archive.write_bytes(tar_of({file.name: file.read_bytes() for file in adapter.iterdir()}))
    order = ImportOrder(str(archive), str(target), {"tiny": str(TINY)}, "tiny")
    order.write(tmp_path / "order.json")
    assert importing.main(str(tmp_path / "order.json"), str(tmp_path / "report.json")) == 0
    return ImportReport.read(tmp_path / "report.json")


def copied(adapter: Path, folder: Path) -> Path:
    return shutil.copytree(adapter, folder)


def test_an_imported_adapter_is_compared_with_peft_from_then_on(
    tmp_path: Path, adapter: Path
) -> None:
    # What it brings of this is not believed: these numbers would let every adapter pass, and cost hours.
    theirs = {
        "messages": [],
        "prompt": [1] * 100,
        "tokens": [0],
        "logits": [0],
        "spread": 1e300,
        "greedy": [],
        "leads": [],
    }
    brought = copied(adapter, tmp_path / "brought")
    (brought / PARITY_FILE).write_text(json.dumps({"dtype": "float32", "probes": [theirs] * 100}))
    assert imported(tmp_path, brought) == ImportReport("tiny")
    taken = tmp_path / "taken"
    assert {file.name for file in taken.iterdir()} == {CONFIG, WEIGHTS, PARITY_FILE}
    made = Parity.load(taken)
    assert made is not None
    assert [len(probe.greedy) for probe in made.probes] == [GREEDY_TOKENS] * len(TALKS)
    engine_with_adapter(TINY, taken)
    config = json.loads((taken / CONFIG).read_text())
    (taken / CONFIG).write_text(json.dumps({**config, "lora_alpha": 64}))
    with pytest.raises(AdapterRefused, match="answer otherwise than after training"):
        engine_with_adapter(TINY, taken)


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def other_width(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = torch.zeros(4, 7)


def other_rank(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = tensors[name][:2].clone()


def other_module(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("q_proj", "qkv_proj")] = tensors.pop(name)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50])


def with_dora(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "use_dora": True}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_weights(with_nan), "holds values that are not finite"),
        (change_weights(other_width), "do not fit the base model"),
        (change_weights(other_rank), "do not fit together"),
        (change_weights(other_module), "qkv_proj"),
        (cut, "adapter files cannot be read"),
        (with_dora, "LoRA option use_dora is not supported"),
    ],
    ids=("nan", "shape", "rank", "module", "cut", "dora"),
)
def test_an_adapter_that_cannot_be_served_is_refused_in_a_clause(
    tmp_path: Path, adapter: Path, change: Callable[[Path], None], why: str
) -> None:
    bad = copied(adapter, tmp_path / "bad")
    change(bad)
    fault = str(imported(tmp_path, bad).fault)
    assert why in fault
    assert fault.startswith("cannot be served: ")
