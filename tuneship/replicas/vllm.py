"""Replicas that are vLLM servers, for hosts with a GPU: one process group per replica, any number of adapters in it.

Not run on a GPU by this project; `tests/unit/replicas/test_vllm.py` names what it was tested with. The server listens
on a socket in a private folder and nowhere else, requires a random key even there, and logs no request: vLLM's own key
guards `/v1` only, and loading adapters at run time is meant for trusted callers. See `openai_link.py`.
"""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from tuneship.host.gpus import VARIABLE, GpuLease, GpuLeases
from tuneship.host.socket_folder import socket_folder
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.replicas.engine_kinds import USUAL_VLLM_RANK, VLLM_RANK_OPTION, VllmServer
from tuneship.replicas.openai_link import BASE, OpenAiLink
from tuneship.replicas.replica import Replica, StartReplica
from tuneship.serving.replica_client import ReplicaLost, ReplicaRefused

HEALTH_POLL_S = 0.25
# Idle connections are closed sooner than the server closes them, so that no request meets a closed
# one.
KEEPALIVE_S = 2.0
SOCKET = "socket"
MEMORY = "/dev/shm"  # noqa: S108 - mkdtemp makes a private folder there
# Different adapters in one step, adapters in main memory, largest rank. The options of a base model
# come later on the command line and take precedence.
ADAPTERS = (
    *("--enable-lora", "--max-loras", "8", "--max-cpu-loras", "64"),
    *(VLLM_RANK_OPTION, str(USUAL_VLLM_RANK)),
)
ALWAYS = (
    "--generation-config=vllm",  # no sampling defaults of the checkpoint: requests set all
    f"--served-model-name={BASE}",
    "--no-enable-log-requests",
    "--disable-uvicorn-access-log",
)
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def vllm_starter(
    runtime: Runtime,
    server: VllmServer,
    gpus: GpuLeases | None = None,
    new_key: Callable[[], str] = secrets.token_urlsafe,
) -> StartReplica:
    """Make the function that starts replicas of vLLM, as processes on this machine.

    `gpus`: those that other processes use, too; None leaves the choice to vLLM, which takes the first.
    """
    leases = gpus or GpuLeases(tuple)

    async def start_replica(base: Path, log: Path) -> Replica:
        key, held = new_key(), ExitStack()
        # In memory where possible, since the server gets decrypted adapters there.
        folder = Path(tempfile.mkdtemp(prefix="tuneship-", dir=socket_folder(MEMORY)))
        try:
            lease = held.enter_context(leases.lease(server.gpus, server.named_gpus))
            worker = runtime.start(_worker_spec(server, base, log, folder, key, lease))
        except BaseException:
            held.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
        client = httpx.AsyncClient(
            base_url="http://localhost",  # the socket is the address
            headers={"Authorization": f"Bearer {key}"},
            transport=httpx.AsyncHTTPTransport(uds=str(folder / SOCKET), limits=limits),
            follow_redirects=True,
            trust_env=False,
        )
        link = OpenAiLink(client, worker, folder, held)
        try:
            async with asyncio.timeout(server.patience_s):
                await _wait_healthy(link, worker)
        except BaseException as error:
            worker.kill()
            await link.aclose()
            if isinstance(error, TimeoutError):
                text = f"the server was not ready within {server.patience_s:g} s"
                raise ReplicaLost(text) from None
            raise
        return Replica(worker, link)

    return start_replica


def _worker_spec(
    server: VllmServer, base: Path, log: Path, folder: Path, key: str, lease: GpuLease
) -> WorkerSpec:
    """Describe the server's process, which works in a folder of its own."""
    # vLLM takes the first that it sees. It sees all: options may ask for more than are understood here.
    seen = ",".join((*lease.gpus, *lease.others))
    chosen = {VARIABLE: seen} if lease.others else {}
    command = (
        *server.command,
        str(base.absolute()),
        *ADAPTERS,
        *server.options,
        *ALWAYS,  # last, so that no option of the catalogue overrides them
        f"--uds={folder / SOCKET}",
    )
    return WorkerSpec(
        module="tuneship.processes.external_program",
        arguments=(str(folder), *command),
        log=log,
        environment={**ENVIRONMENT, **chosen, "VLLM_API_KEY": key},
        needs_network=True,
    )


async def _wait_healthy(link: OpenAiLink, worker: Worker) -> None:
    """Poll until the server is healthy. Raises `ReplicaRefused` when its process ends before."""
    while worker.exit_code() is None:
        try:
            await link.stats()
        except ReplicaLost:
            await asyncio.sleep(HEALTH_POLL_S)
        else:
            return
    raise ReplicaRefused("the server ended while it started; its log says why")
