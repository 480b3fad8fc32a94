"""Every declared operation is served and guarded by a scope, and each side loads only its own packages."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from pydantic import SecretStr

from tuneship.client import AsyncClient, Client
from tuneship.contract.declaring.operation import DECLARED
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.contract.declaring.verbs import Verb
from tuneship.contract.openai.declaring import OPENAI
from tuneship.service.all_handlers import OPENAI_SERVED, SERVED
from tuneship.settings import ClientSettings


@pytest.mark.parametrize(("declared", "served"), [(DECLARED, SERVED), (OPENAI, OPENAI_SERVED)])
def test_every_declared_operation_is_served_with_a_known_scope_and_nothing_else_is(
    declared: list[Any], served: dict[str, Any]
) -> None:
    assert {one.name: one for one in declared} == {
        name: binding.operation for name, binding in served.items()
    }
    assert len({one.name for one in declared}) == len(declared)
    assert len({(one.method, one.path) for one in declared}) == len(declared)
    assert {one.scope for one in declared} <= SCOPES
    docs = [one.declaration.__doc__ or "" for one in declared]
    assert [text for text in docs if not text.rstrip().endswith(".")] == []


def test_reading_never_changes_and_creating_answers_201() -> None:
    for operation in DECLARED:
        if operation.scope.endswith(":read"):
            # A file is checked and not kept; whoever may look may sign in to look.
            posts_of_readers = ("validate_dataset", "create_sign_in_link")
            assert operation.method == "GET" or operation.name in posts_of_readers
        assert operation.is_creating == (operation.status == 201)
        assert operation.method == "POST" or not operation.is_creating


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_both_clients_have_exactly_one_verb_for_each_operation(
    kind: type[Client] | type[AsyncClient],
) -> None:
    client = kind(ClientSettings(url="http://x", api_key=SecretStr("k"), client_id="c"))
    verbs = Counter(
        verb.operation.name
        for group in vars(client).values()
        for base in type(group).__mro__
        for verb in vars(base).values()
        if isinstance(verb, Verb)
    )
    # An endpoint's address does not show which kind of endpoint it is.
    both_kinds_answer = {"generate_by_endpoint": 2, "embed_by_endpoint": 2}
    assert verbs == Counter({one.name: 1 for one in DECLARED} | both_kinds_answer)


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_the_api_process_loads_no_engine_and_nothing_for_agents() -> None:
    loaded = loaded_by("import tuneship.cli.main, tuneship.service.serve")
    assert not loaded & {"torch", "transformers", "peft", "alembic", "prefect", "pandas"}
    assert "cryptography.x509" not in loaded


@pytest.mark.parametrize("statement", ["import tuneship.client", "import tuneship.gates"])
def test_the_library_side_of_the_pipeline_loads_no_service(statement: str) -> None:
    loaded = loaded_by(statement)
    assert not loaded & {"torch", "fastapi", "starlette", "sqlalchemy", "prefect", "uvicorn"}
    rooms = {"service", "store", "training", "serving", "runtime"}
    assert not loaded & {f"tuneship.{room}" for room in rooms}


def test_the_client_loads_pandas_and_pyarrow_only_when_they_are_needed() -> None:
    assert not loaded_by("import tuneship.client") & {"pandas", "pyarrow", "datasets"}


def test_flows_and_tasks_load_none_of_the_services_rooms() -> None:
    loaded = loaded_by("import flows.tune_and_deploy, tasks.jobs, tasks.endpoints")
    rooms = {"service", "store", "training", "serving", "runtime"}
    assert not loaded & {f"tuneship.{room}" for room in rooms}
    assert "torch" not in loaded
