"""The loop, the data reader and the checkpoints follow the objective, whatever it is."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.prompts.template import PromptTemplate
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.examples.batches import collate
from tuneship.training.examples.data_files import read_data, read_rows
from tuneship.training.examples.tokenized_examples import Encoder, Segment, TokenizedExamples
from tuneship.training.learner import Learner
from tuneship.training.objective import AnswerEnds, ExampleRows, SupervisedFineTuning, add_totals
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.training_loop import Standing, TrainingLoop

if TYPE_CHECKING:
    from tests.unit.training.conftest import JobMaker


class Accuracy(SupervisedFineTuning):
    """Prefers the checkpoint with the most correct tokens."""

    deciding_measure = "accuracy"
    lower_is_better = False


class Pairs(SupervisedFineTuning):
    """Makes two rows of each example, as preference data needs."""

    def rows(
        self, example: Any, dataset_format: DatasetFormat, template: PromptTemplate
    ) -> ExampleRows:
        prompt = Segment(example["prompt"], is_target=False)
        answers = (Segment(example[name], is_target=True) for name in ("chosen", "rejected"))
        return ExampleRows([[prompt, answer] for answer in answers], has_tools=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("objective", [SupervisedFineTuning(), Accuracy()])
def test_the_deciding_measure_picks_the_best_checkpoint_and_stops_early(
    make_job: "JobMaker", tiny_model: Path, objective: SupervisedFineTuning
) -> None:
    spec = make_job(
        epochs=5, learning_rate=0.05, validation_frequency=3, early_stopping_patience=2
    ).spec
    base = load_base(str(tiny_model))
    file = spec.checkpoint_dir.parent / "progress.jsonl"
    with closing(ProgressFile(file)) as progress:
        data = read_data(spec, load_encoder(str(tiny_model), base), objective, progress)
        learner = Learner(base, spec.hyperparameters, objective)
        stop = StopRequest(file.with_name("cancel"))
        evaluated: dict[int, float] = {}

        class Watched(TrainingLoop):
            def _evaluate(self) -> None:
                super()._evaluate()
                step, measures = self._standing.step, self._standing.measures
                if step > 0:
                    evaluated[step] = measures[objective.deciding_measure]

        standing = Watched(spec, data, learner, progress, stop).execute(1e9, lambda: 0.0)
    sign = 1 if objective.lower_is_better else -1
    best = min(evaluated, key=lambda step: sign * evaluated[step])
    assert (standing.best_step, standing.best) == (best, evaluated[best])
    assert standing.step in (best + 6, 30)


def test_rows_of_one_example_stay_together_and_are_dropped_together(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text_format = ModelTextFormat.of_base(tiny_model, tokenizer)
    encoder = Encoder(text_format, context_length=8, vocabulary=261)
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "abc", "chosen": "de", "rejected": "fgh"}\n'
        '{"prompt": "abc", "chosen": "d", "rejected": ""}\n'
        '{"prompt": "abcdefghi", "chosen": "d", "rejected": "e"}\n'
        '{"prompt": "x", "chosen": "yz", "rejected": "zzzzzzzzzzzz"}\n'
    )
    read = read_rows(path, "instruction", encoder, Pairs())
    texts = [
        tokenizer.decode(read.rows.tokens[read.rows.starts[row] : read.rows.starts[row + 1]])
        for row in range(len(read.rows))
    ]
    assert texts == ["abcde", "abcfgh", "xyz", "xzzzzzzz"]
    assert (read.truncated, read.dropped) == (3, 4)


@pytest.mark.parametrize(
    ("ends", "context_length", "expected"),
    [
        ((7,), 9, 1 / 3),
        ((7, 8), 9, 2 / 3),
        ((5,), 9, 0.0),
        ((), 9, 1 / 3),
        ((7,), 4, 0.5),
        ((7,), 2, None),
    ],
)
def test_ends_are_learnt_where_the_end_is_the_likeliest_token_behind_the_answer(
    ends: tuple[int, ...], context_length: int, expected: float | None
) -> None:
    """Rows of 3, 2 and 4 tokens, whose last targets are 7, 8 and 9; the model ranks 7, 7 and 7 first."""
    rows = TokenizedExamples(
        np.array([1, 2, 7, 1, 8, 1, 2, 3, 9], dtype=np.int32),
        np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=np.bool_),
        np.array([0, 3, 5, 9]),
    )
    batch = collate(rows, rows.all_indices)
    logits = torch.zeros(len(batch.targets), 10)
    logits[:, 7] = 1.0
    objective = SupervisedFineTuning(AnswerEnds(ends, context_length))
    assert objective.measures(objective.evaluate(logits, batch)).get("ends_learnt") == expected


def test_perplexity_of_a_huge_loss_is_still_a_number() -> None:
    objective = SupervisedFineTuning()
    measures = objective.measures({"loss": 8e6, "correct": 1, "tokens": 4})
    assert measures == {"validation_loss": 2e6, "accuracy": 0.25}
    assert 1e300 < objective.reported(measures)["perplexity"] < float("inf")


def test_totals_of_micro_batches_and_ranks_add_up() -> None:
    assert add_totals({}, {"loss": 1.5, "tokens": 2}) == {"loss": 1.5, "tokens": 2}
    assert add_totals({"loss": 1.5, "tokens": 2}, {"loss": 2.5, "tokens": 3}) == {
        "loss": 4.0,
        "tokens": 5,
    }


def test_a_checkpoint_of_an_earlier_version_is_resumed_and_written_alike() -> None:
    state = {
        "step": 6,
        "validation_loss": 0.5,
        "accuracy": 0.75,
        "best_step": 3,
        "best_loss": 0.25,
        "epoch_loss": 1.5,
        "tokens_at_once": 1024,
        "devices": 2,
    }
    standing = Standing.from_state(state)
    assert standing.measures == {"validation_loss": 0.5, "accuracy": 0.75}
    assert (standing.best, standing.micro_batch_tokens) == (0.25, 1024)
    assert list(standing.to_state().items()) == list(state.items())
    before_any = {name: value for name, value in state.items() if name != "best_loss"}
    assert Standing.from_state(before_any).best is None
    assert Standing.from_state(before_any).to_state() == before_any
