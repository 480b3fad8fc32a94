"""The ids of both APIs stand for each other."""

import pytest

from tuneship.contract.openai.ids import (
    job_of_result_file,
    own_id,
    own_model_id,
    result_file_of,
    shown_id,
)


@pytest.mark.parametrize("own", ["ds_4k2m", "ft_4k2m"])
def test_an_id_comes_back(own: str) -> None:
    assert own_id(shown_id(own)) == own
    assert own_id(own) == own


def test_a_result_file_belongs_to_a_job() -> None:
    assert job_of_result_file(result_file_of("ft_4k2m")) == "ft_4k2m"
    assert job_of_result_file("file-4k2m") is None


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("ft:tiny:notes:x1", "ft:tiny:notes:x1"),
        ("ft:tiny:alice:notes:x1", "ft:tiny:notes:x1"),
        ("ft:tiny:notes:x1:ckpt-step-9", "ft:tiny:notes:x1"),
        ("ft:tiny:alice:notes:x1:ckpt-step-9", "ft:tiny:notes:x1"),
        ("ft:tiny:bob:notes:x1", "ft:tiny:bob:notes:x1"),
        ("gpt-4o-mini", "gpt-4o-mini"),
    ],
)
def test_a_tuned_models_id_is_read_in_openais_forms(sent: str, stored: str) -> None:
    assert own_model_id(sent, "alice") == stored
