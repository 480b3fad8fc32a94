"""A flow as a plain script: `--params FILE [--result FILE]`, one clear message for every bad input, exit codes.

Without `TUNESHIP_URL` the script starts its own service, without `PREFECT_API_URL` its own Prefect server, and stops
both at its end. The result file is written in every case. Knows no particular flow.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from urllib.parse import urlsplit

from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)
from pydantic import BaseModel, ValidationError

from flows.forms.release_form import DIRECTORY
from flows.rollout.result import RollbackIncomplete
from flows.rollout.rollback import stopping_signal
from flows.script.console import Screen, open_screen, show_runs_on
from flows.script.local_processes import (
    REFUSED_BY_PREFECT,
    CompanionFailed,
    embedded_service,
    is_refused,
    prefect_server,
    running_service,
)
from flows.shared.approval import mark_as_own_server
from flows.shared.errors import BadInput
from flows.shared.private_files import make_private
from flows.shared.release_events import finish
from flows.shared.signals import Stopped, ignore_stops, stop_once, uninterrupted
from tuneship.cli.parameter_files import UnreadableParameters, mapping_in, problems_of
from tuneship.client import ApiError, BadResponse, ServiceUnreachable, TuneshipError
from tuneship.client.error_text import error_text
from tuneship.contract.common import count
from tuneship.gates.reports.words import OUTCOMES, in_words
from tuneship.host.durable import write_private
from tuneship.prefect.connection import api, connect, disconnect
from tuneship.prefect.waits import DeploymentNotRunning, JobOverdue
from tuneship.settings import ClientSettings, PipelineSettings, embedded_service_environment

# By outcome; everything else is 1, and after a signal 128 + its number.
EXIT_CODES = {
    "promoted": 0,
    "skipped": 0,
    "nothing_to_do": 0,
    "returned": 0,
    "rejected": 3,
    "rolled_back": 4,
    "paused": 5,
}
STOPS = (Stopped, KeyboardInterrupt, TerminationSignal)
EXPECTED = (
    BadInput,
    TuneshipError,
    CompanionFailed,
    JobOverdue,
    DeploymentNotRunning,
)
FLUSH_SECONDS = 5.0
STOPPED = "stopped"
# Reasons of a rollout whose traffic was returned because its run was stopped.
BY_THE_STOP = ("cancelled", "error")
# Reasons in the result. A refusal has the service's code instead, and every other expected error "failed".
REASONS = (
    (BadInput, "bad_input"),
    (ServiceUnreachable, "service_unreachable"),
    (CompanionFailed, "service_unreachable"),
    (BadResponse, "bad_response"),
)
# A Prefect server for one run needs no UI.
PREFECT_SERVER = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}


class FlowOutcome(Protocol):
    """The result of a flow."""

    @property
    def outcome(self) -> str:
        """One of the outcomes that have an exit code."""
        ...

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """The result as plain JSON values."""
        ...


Parameters = TypeVar("Parameters", bound=BaseModel)


@dataclass(frozen=True)
class Script(Generic[Parameters]):
    """The flow of a script and the model of its parameters."""

    run: Callable[[Parameters], FlowOutcome]
    parameters: type[Parameters]
    when_stopped: Callable[[], FlowOutcome | None] | None


@dataclass(frozen=True)
class Ending:
    """How the script ended: the result for the file, a message for people, the exit code."""

    result: dict[str, Any]
    message: str
    exit_code: int


def run_script(
    run: Callable[[Parameters], FlowOutcome],
    parameters: type[Parameters],
    description: str,
    when_stopped: Callable[[], FlowOutcome | None] | None = None,
    stages: Sequence[str] = (),
) -> NoReturn:
    """Read the parameters, run the flow on them and exit with its code.

    `when_stopped` may return the result of a run that an error or a signal stopped, after its clean-up; without it the
    result says only why it was stopped. `stages`: what the picture on a terminal shows; a flow without stages is shown
    in lines.
    """
    chosen = _arguments(description, parameters)
    params, result = chosen.params, chosen.result
    screen = open_screen(stages, chosen.plain)
    stop_once(screen.say, screen.stopping)
    try:
        if result is not None:
            _check_writable(result)
        ending = _run(Script(run, parameters, when_stopped), params, screen)
    except BaseException as error:  # noqa: BLE001 - a script ends in a message and a code, whatever happened
        ending = _ending_after(error)
    ignore_stops()
    screen.close(None if ending.message else ending.result)
    if ending.message:
        screen.say(ending.message, "bold red")
    if result is not None:
        try:
            result.write_text(json.dumps(ending.result, indent=2) + "\n")
        except OSError as error:
            # A disk that is full by now must not change the exit code: it says where the traffic is.
            screen.say(f"{result}: the result cannot be written ({error.strerror})", "bold red")
    sys.exit(ending.exit_code)


def _check_writable(result: Path) -> None:
    """Raise `BadInput` where the result could not be written, before hours of work. An existing file stays."""
    try:
        result.parent.mkdir(parents=True, exist_ok=True)
        is_new = not result.exists()
        with result.open("a"):
            pass
        if is_new:  # a killed run leaves no empty result
            result.unlink()
    except OSError as error:
        raise BadInput(f"{result}: the result cannot be written ({error.strerror})") from None


def load_parameters(file: Path, parameters: type[Parameters]) -> Parameters:
    """Read parameters from a YAML or JSON file; its paths are relative to it. Raises `BadInput`."""
    try:
        content = mapping_in(file.read_text())
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is not valid YAML or JSON") from None
    except UnreadableParameters as fault:
        raise BadInput(f"{file}: {fault}") from None
    try:
        return parameters.model_validate_json(
            json.dumps(content), context={DIRECTORY: file.resolve().parent}
        )
    except ValidationError as error:
        problems = problems_of(error, content, parameters)
        raise BadInput(f"{file}: {count(len(problems), 'problem')}", problems) from None


def _arguments(description: str, parameters: type[BaseModel]) -> argparse.Namespace:
    """Parse the command line; parameters that all have defaults need no file."""
    needed = any(field.is_required() for field in parameters.model_fields.values())
    parser = argparse.ArgumentParser(description=description, exit_on_error=False)
    parser.add_argument(
        "--params",
        type=Path,
        required=needed,
        metavar="FILE",
        help="YAML or JSON file of parameters",
    )
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the result here as JSON")
    parser.add_argument(
        "--plain", action="store_true", help="write lines on a terminal, too, as into a file"
    )
    try:
        return parser.parse_args()
    except argparse.ArgumentError as error:
        sys.stderr.write(f"{parser.format_usage()}{error}\n")
        sys.exit(1)
    except SystemExit as error:
        # argparse exits with 2 where it does not raise; here a bad call is 1.
        sys.exit(1 if error.code else 0)


def _run(script: "Script[Parameters]", params: Path | None, screen: Screen) -> Ending:
    chosen = load_parameters(params, script.parameters) if params else script.parameters()
    with ExitStack() as started:
        if not ClientSettings().url:
            own = PipelineSettings()
            settings = running_service(own.data_dir)
            if settings is not None:
                screen.wait(f"using the service that runs at {settings.url}")
            else:
                screen.wait("starting a service for this run")
                settings = started.enter_context(embedded_service(own))
                screen.serves_until_the_end()
                screen.wait(f"service ready at {settings.url}")
            connect(settings)
            started.callback(disconnect)
        started.callback(finish)
        # A wrong key or a dead service fails here, before anything is created.
        api().models.list(limit=1)
        show_runs_on(screen)
        started.enter_context(_prefect(screen))
        try:
            outcome = script.run(chosen)
        except BaseException as error:  # noqa: BLE001 - a run may be stopped by any
            stop = stopping_signal(error)
            with uninterrupted():
                ending = _ending_after(stop if isinstance(stop, STOPS) else error)
                return _with_what_was_done(script, ending, screen)
    code = EXIT_CODES.get(outcome.outcome, 1)
    return Ending(outcome.model_dump(mode="json"), "", code)


def _with_what_was_done(script: "Script[Any]", ending: Ending, screen: Screen) -> Ending:
    """The ending of a run that was stopped, with what it had done, as far as that is known."""
    try:
        left = script.when_stopped() if script.when_stopped else None
    except Exception as fault:  # noqa: BLE001 - the exit code stays, whatever the run has left
        screen.say(f"what the run had done is not known ({type(fault).__name__})", "bold red")
        left = None
    if left is None:
        return ending
    known = left.model_dump(mode="json")
    # A rollout has ended with a reason of its own.
    why = () if known.get("rollout_id") else ("reason",)
    result = known | {
        name: ending.result[name] for name in ("message", *why) if name in ending.result
    }
    message = ending.message
    if message == STOPPED:
        message = f"{STOPPED}: {_how_it_is_left(result)}"
    return replace(ending, result=result, message=message)


def _how_it_is_left(result: Mapping[str, Any]) -> str:
    """Say where the traffic of a stopped release is, and how to continue."""
    outcome, reason = str(result["outcome"]), str(result["reason"])
    if outcome != "aborted":
        said = OUTCOMES[outcome]
    elif result.get("rollout_id") is None:
        said = "No traffic was shifted."
        # The clean-up, which writes how a rollout has ended, may have failed.
        if result.get("candidate_deployment_id") is not None:
            said = "No end of a rollout is recorded: check the traffic of the endpoint."
    elif reason in BY_THE_STOP:
        said = OUTCOMES["rolled_back"]
    else:
        said = f"The rollout had ended: {in_words(reason)}."
    if outcome == "aborted":
        said += " Run the same command to begin again; the service keeps the uploaded data."
    return f"{said[0].lower()}{said[1:]} Record: {result['record']}"


def _stopped(stop: BaseException) -> Ending:
    code = stop.exit_code if isinstance(stop, Stopped) else 130
    code = 143 if isinstance(stop, TerminationSignal) else code
    return Ending(_aborted("cancelled", "stopped by a signal"), STOPPED, code)


@contextmanager
def _prefect(screen: Screen) -> Generator[None]:
    """Use the Prefect server of `PREFECT_API_URL` (or of the active profile), or start one."""
    if get_current_settings().api.url:
        yield
        return
    screen.wait("starting a Prefect server for this run")
    log = PipelineSettings().reports.expanduser() / "prefect.log"
    environment = embedded_service_environment() | PREFECT_SERVER
    with prefect_server(environment, log) as variables:
        url, auth_string = variables["PREFECT_API_URL"], variables["PREFECT_API_AUTH_STRING"]
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth_string}):
            mark_as_own_server(url)
            try:
                yield
            finally:
                with uninterrupted():  # logs and events that are still queued need the server
                    APILogWorker.drain_all(timeout=FLUSH_SECONDS, at_exit=False)
                    EventsWorker.drain_all(timeout=FLUSH_SECONDS, at_exit=False)


def _ending_after(error: BaseException) -> Ending:
    if isinstance(error, RollbackIncomplete):
        return Ending(error.result.model_dump(mode="json"), str(error), 1)
    if isinstance(error, STOPS):
        return _stopped(error)
    if isinstance(error, EXPECTED):
        reason = next((name for kind, name in REASONS if isinstance(error, kind)), "failed")
        message = str(error)
        if isinstance(error, ApiError):
            # Details name fields, lines and codes; the service never echoes the input.
            reason, message = error.sent_code, error_text(error)
        elif isinstance(error, ServiceUnreachable):
            # Without the variable it was a service of this machine, perhaps that of another script.
            message = f"{error}: the service of this machine has ended; `tuneship serve` keeps one running"
            if url := ClientSettings().url:
                host = urlsplit(url).netloc.rpartition("@")[2]
                message = f"{error}: is {host} (TUNESHIP_URL) the address of the service, and does it run?"
        return Ending(_aborted(reason, message), message, 1)
    if is_refused(error):
        return Ending(_aborted("bad_input", REFUSED_BY_PREFECT), REFUSED_BY_PREFECT, 1)
    # The text of an unexpected error may quote a dataset, so it goes to a file of this machine only.
    log = PipelineSettings().reports.expanduser() / "error.log"
    details = str(log)
    try:
        make_private(log.parent)
        write_private(log, "".join(traceback.format_exception(error)))
    except OSError as fault:  # the error may be the full disk itself
        details = f"not written, {log}: {fault.strerror}"
    message = f"unexpected {type(error).__name__} (details: {details})"
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    return Ending(_aborted("internal_error", message), message, 1)


def _aborted(reason: str, message: str) -> dict[str, Any]:
    return {"outcome": "aborted", "reason": reason, "message": message}
