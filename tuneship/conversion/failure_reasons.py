"""Says in a clause for people why a process of this package failed, without a path or a page of names."""

import errno
import os
import re
import traceback
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError

from tuneship.conversion.gguf_header import GgufRefused
from tuneship.prompts.template import TemplateFailed
from tuneship.prompts.text_tokenizer import TokenizerFault
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.models.model import ModelRefused
from tuneship.training.progress_file import TrainingFailed

# The library that reads and writes tensors has the number of an error in its text alone.
OS_ERROR = re.compile(r"\(os error (\d+)\)")
MAX_CHARACTERS = 1000
# Errors whose text is written here.
NAMED = (
    GgufRefused | ModelRefused | AdapterRefused | TemplateFailed | TokenizerFault | TrainingFailed
)


def fault_of(error: Exception) -> str:
    """Say what failed. The text of a library's error is left out, since it may hold pages of names."""
    if isinstance(error, NAMED):
        # A text may quote a name in a foreign file.
        return str(error)[:MAX_CHARACTERS]
    found = OS_ERROR.search(str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return "the disk is full"
    if number:
        return f"a file of it cannot be read or written: {os.strerror(number)}"
    known = {
        MemoryError: "the machine's memory was not enough",
        SafetensorError: "its weights are damaged",
    }
    if type(error) in known:
        return known[type(error)]
    traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name} line {last.lineno}"
    return f"it cannot be read: {type(error).__name__} in {place}"


def versions(*names: str) -> dict[str, str]:
    """The versions of libraries by name."""
    return {name: version(name) for name in names}
