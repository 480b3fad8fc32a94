"""Make adapters as somebody does who trains with peft alone."""

from pathlib import Path
from typing import Any

from tuneship.prompts.template import PromptTemplate


def trained_elsewhere(base: Path, folder: Path, **options: Any) -> Path:
    """Save a random adapter as peft does, with the template of its base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    PromptTemplate.load(base).save(folder)
    return folder
