"""Rotary embeddings that depend on the length of a text: each text is rotated as if it were alone.

Models with LongRoPE (Phi 3) have two sets of factors, one for texts up to the length of their first training and one
for longer texts. transformers chooses the set by the longest text of a batch, so that a short text beside a long one
gets other logits. Used by training (`learner.py`) and by serving (`generic.py`).
"""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LONGROPE = "longrope"
BORDER = "original_max_position_embeddings"


class DifferentBorders(ValueError):
    """The layers of a model change their rotary factors at different text lengths, which is not supported."""

    def __init__(self) -> None:
        """The message names the setting to make consistent."""
        super().__init__(
            f"its layers change their rotary factors at different lengths: give them one {BORDER}"
        )


class RotationByLength:
    """The rotary embeddings of one model of transformers, which it changes where they depend on the length."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """Raises `DifferentBorders`."""
        rope: dict[str, Any] = (
            getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        )
        settings = [rope, *(one for one in rope.values() if isinstance(one, dict))]
        borders = {one[BORDER] for one in settings if one.get("rope_type") == LONGROPE}
        if len(borders) > 1:
            raise DifferentBorders
        # The most tokens of a text that is rotated by the short factors; None: the length does not matter.
        self.border: int | None = next(iter(borders), None)
        # The length of each token's text, [rows, tokens] or [rows, 1]; None: what transformers sees in the batch.
        self.lengths: Tensor | None = None
        for module in model.modules() if borders else ():
            if hasattr(module, "rope_type"):
                module.forward = partial(self._rotate, module.forward)

    def _rotate(
        self, rotate: Any, x: "Tensor", position_ids: "Tensor", *arguments: Any, **options: Any
    ) -> tuple["Tensor", ...]:
        """Compute cosines and sines as the module's own `rotate` does for each text alone."""
        if self.lengths is None or self.border is None:
            return rotate(x, position_ids, *arguments, **options)
        is_long = self.lengths > self.border
        # The module looks at the highest position: those beyond the border are none of a short text.
        below = position_ids.clamp(max=self.border - 1)
        if not is_long.any():
            return rotate(x, below, *arguments, **options)
        # The last position lies beyond the border: the chunk of a long prompt may end before it.
        size = position_ids.shape[-1]
        beyond = position_ids.new_full((*position_ids.shape[:-1], size + 1), self.border)
        beyond[..., :size] = position_ids
        long = [part[..., :size, :] for part in rotate(x, beyond, *arguments, **options)]
        if is_long.all():
            return tuple(long)
        short = rotate(x, below, *arguments, **options)
        is_long = is_long.unsqueeze(-1)
        return tuple(one.where(is_long, other) for one, other in zip(long, short, strict=True))
