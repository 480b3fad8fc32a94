"""The chat templates of the zoo: real ones where their folder is at hand, and kinds written here.

One entry of `KINDS` is one column.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuneship.prompts.template import BUILT_IN_TEMPLATE

ROOT = Path(__file__).parents[3]
FOLDERS = tuple(place / "shared" / "data" / "chat_templates" for place in (ROOT, ROOT.parent))


@dataclass(frozen=True)
class TemplateKind:
    """A chat template, and the tokens that it writes."""

    name: str
    # Its text, or texts by name; None: the checkpoint has none, and ours is used.
    source: str | Mapping[str, str] | None
    # The special tokens in it that a tokenizer of its family has.
    marks: tuple[str, ...] = ()
    # Words of a refusal although an answer could be right, by the name of the conversation (empty: all).
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def settings(self) -> dict[str, object]:
        """Its fields in `tokenizer_config.json`, where several templates stand."""
        if isinstance(self.source, Mapping):
            named = [{"name": name, "template": text} for name, text in self.source.items()]
            return {"chat_template": named}
        return {}

    def save(self, folder: Path) -> None:
        """Write the template's own file, where it has one."""
        if isinstance(self.source, str):
            (folder / "chat_template.jinja").write_text(self.source)

    @property
    def for_transformers(self) -> str | None:
        """The template that transformers is given, because the checkpoint has none."""
        return BUILT_IN_TEMPLATE if self.source is None else None


IM = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
DEEPSEEK = tuple(
    f"<\uff5c{word}\uff5c>" for word in ("User", "Assistant", "end\u2581of\u2581sentence")
)
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
TRIMMED_CHATML = CHATML.replace("message['content']", "message['content'] | trim")
DEFAULT_SYSTEM = (
    """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
    + CHATML
)
TOOL_USE = "{{ 'Functions: ' + (tools | tojson) + '\\n' }}" + CHATML
ALPACA = """\
{{ 'Below is an instruction.\\n\\n' }}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '### Response:\\n' + message['content'] }}{{ '' if loop.last else '\\n\\n' }}
{%- else -%}
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}
"""
LLAMA2 = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ bos_token + '<<SYS>>\\n' + message['content'] + '\\n<</SYS>>\\n\\n' }}
{%- elif message['role'] == 'user' -%}
{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}
{%- else -%}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
ALTERNATING = """\
{{ bos_token }}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate, and there is no system turn') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else -%}
{{ ' ' + message['content'] | trim + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
LLAMA3 = """\
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""
ZEPHYR = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""
STRIPS_REASONING = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' and not loop.last and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
OPENS_THINK = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
GENERATION = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}
{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
GENERATION_WITH_BREAK = GENERATION.replace(
    "+ '<|im_end|>' }}{%- endgeneration -%}\n{{ '\\n' }}",
    "+ '<|im_end|>\\n' }}{%- endgeneration -%}",
)
GENERATION_WITHOUT_END = GENERATION.replace(
    "+ '<|im_end|>' }}{%- endgeneration -%}\n{{ '\\n' }}",
    "}}{%- endgeneration -%}\n{{ '<|im_end|>\\n' }}",
)
TRAILING_SPACE = """\
{%- for message in messages -%}
{{ message['role'] | capitalize + ': ' + message['content'] }}
{{- eos_token if message['role'] == 'assistant' else '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}
"""
END_BETWEEN_TURNS = CHATML.replace(
    "+ '<|im_end|>' + '\\n'", "+ ('' if loop.last else '<|im_end|>\\n')"
)
EOS_BEHIND_ALL = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""
DATED = (
    """\
{%- if strftime_now is defined -%}
{{ '<|im_start|>system\\nToday: ' + strftime_now('%Y') + '<|im_end|>\\n' }}
{%- endif -%}
"""
    + CHATML
)
NEEDS_BOS = "{{ bos_token + 'Chat\\n' }}" + CHATML
ASKS_FOR_BOS = (
    "{%- if bos_token is defined -%}{{ bos_token }}{%- else -%}{{ 'Chat\\n' }}{%- endif -%}"
    + CHATML
)
# Writes the header of the answer whether it is asked to or not.
ALWAYS_ASKS = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ message['content'] + eos_token }}
{%- else -%}
{{ message['role'] | upper + ': ' + message['content'] + '\\n' }}
{{- 'ASSISTANT:\\n' if message['role'] == 'user' else '' }}
{%- endif -%}
{%- endfor -%}
"""

GEMMA_TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('There is no system turn') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
PHI3 = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

# It looks at the first turn, so it cannot write the prompt of an answer that nothing stands before.
NOT_FIRST = {"assistant first": "no turn stands before it"}

OWN = (
    TemplateKind("built-in", None),
    TemplateKind("ChatML", CHATML, IM),
    TemplateKind("trims", TRIMMED_CHATML, IM),
    TemplateKind("default system", DEFAULT_SYSTEM, IM, NOT_FIRST),
    TemplateKind("named", {"default": CHATML, "tool_use": TOOL_USE}, IM),
    TemplateKind("Alpaca", ALPACA),
    TemplateKind("Llama 2", LLAMA2),
    TemplateKind("alternates", ALTERNATING),
    TemplateKind("Llama 3", LLAMA3, HEADERS),
    TemplateKind("Zephyr", ZEPHYR, ROLES[:3]),
    TemplateKind("Gemma", GEMMA_TURNS, GEMMA),
    TemplateKind("Phi 3", PHI3, ROLES),
    TemplateKind("strips reasoning", STRIPS_REASONING, IM),
    TemplateKind("opens think", OPENS_THINK, IM, {"reasoning": "open the model's reasoning"}),
    TemplateKind("generation", GENERATION, IM),
    TemplateKind("generation, break", GENERATION_WITH_BREAK, IM),
    TemplateKind("generation, no end", GENERATION_WITHOUT_END, IM),
    TemplateKind("trailing space", TRAILING_SPACE, refused={"": "joins the end of the prompt"}),
    TemplateKind("end between turns", END_BETWEEN_TURNS, IM),
    TemplateKind("eos behind all", EOS_BEHIND_ALL, ROLES),
    TemplateKind("dated", DATED, IM),
    TemplateKind("needs bos", NEEDS_BOS, IM),
    TemplateKind("asks for bos", ASKS_FOR_BOS, IM),
    TemplateKind("always asks", ALWAYS_ASKS),
)
# The special tokens of the real templates, by the names of their files.
REAL: dict[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": IM,
    "deepseek-r1-distill": DEEPSEEK,
    "gemma-it": GEMMA,
    "granite-3.0-instruct": GRANITE,
    "llama-2-chat": (),
    "llama-3-instruct": HEADERS,
    "mistral-instruct": (),
    "phi-3": ROLES,
    "phi-4-mini-instruct": ROLES,
    "qwen2.5-instruct": IM,
    "solar-instruct": (),
    "vicuna": (),
    "zephyr": ROLES[:3],
}
REFUSED = {"qwen2.5-instruct": NOT_FIRST}
# The others are indented for readers: their authors say to remove that.
NOT_INDENTED = (
    "deepseek-r1-distill",
    "granite-3.0-instruct",
    "phi-4-mini-instruct",
    "qwen2.5-instruct",
)


def _source(file: Path) -> str:
    text = file.read_text()
    return text if file.stem in NOT_INDENTED else text.replace("    ", "").replace("\n", "")


def _real() -> list[TemplateKind]:
    folder = next((one for one in FOLDERS if one.is_dir()), None)
    if folder is None:
        return []
    return [
        TemplateKind(name, _source(file), marks, REFUSED.get(name, {}))
        for name, marks in REAL.items()
        if (file := folder / f"{name}.jinja").is_file()
    ]


KINDS = (*OWN, *_real())
BY_NAME = {kind.name: kind for kind in KINDS}
