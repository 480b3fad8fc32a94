"""Agents as jobs of a Ray cluster, started over Ray's Jobs REST API. Nothing of Ray is imported by the service.

Ray sees a command line with the certificate of our authority, which is public, and the line that the agent prints.
Its words about a job are hints: it may say that one has failed which still runs.
"""

import logging
import shlex
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from tuneship.agents.launchers import AgentSize, AgentState, CannotLaunch, LauncherAway

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 15.0
ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}
JOBS = "/api/jobs/"
REFUSES_STRANGERS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True)
class RayCluster:
    """The address of a cluster's dashboard, with its credentials."""

    url: str
    token: str = field(repr=False)
    # TLS settings for an address that begins with https.
    verify: ssl.SSLContext


@dataclass(frozen=True)
class AgentJob:
    """How an agent is run as a job."""

    # Starts the agent on a node, e.g. `python -m tuneship.agents.agent`.
    command: tuple[str, ...]
    # Ports that it may listen on, e.g. `20000-20999`.
    ports: str
    # Used for a start that names no size.
    size: AgentSize


class RayJobs:
    """Starts agents on the nodes of a cluster. Obeys `Launcher`."""

    is_here = False

    def __init__(self, clusters: Sequence[RayCluster], job: AgentJob) -> None:
        """Start agents on the first cluster; end those of an earlier service on all clusters."""
        self._clusters = clusters
        self._job = job
        self._prefix = ""

    async def check(self) -> None:
        """Make sure that the cluster lets this service in and nobody else. Raises `CannotLaunch`."""
        cluster = self._clusters[0]
        await self._call(cluster, "GET", JOBS)
        stranger = await _answer(cluster, "GET", JOBS, {})
        if stranger.status_code not in REFUSES_STRANGERS:
            raise CannotLaunch(
                "Ray lets everybody in who reaches it: start it with RAY_AUTH_MODE=token"
            )

    async def start(
        self, name: str, arguments: Sequence[str], size: AgentSize | None = None
    ) -> None:
        """Submit a job, and delete the entries of ended jobs. Raises `CannotLaunch`."""
        # Ray gets slow with many entries. They are not deleted as soon as a job has ended, as Ray would write the
        # entry once more when it notices the end itself.
        for ended, status in await self._own_jobs(self._clusters[0]):
            if status in ENDED:
                await self._call(self._clusters[0], "DELETE", f"{JOBS}{ended}", may_miss=True)
        command = shlex.join([*self._job.command, *arguments, "--ports", self._job.ports])
        size = size or self._job.size
        # Ray sets the address of its head there. `exec` makes Ray's own process the parent, whose end
        # the agent notices.
        body: dict[str, Any] = {
            "entrypoint": f'exec {command} --towards "$RAY_ADDRESS"',
            "submission_id": name,
            "entrypoint_num_cpus": size.cpus,  # a job that asks for nothing would run on the head
            "entrypoint_num_gpus": size.gpus,
        }
        if size.memory_bytes:
            body["entrypoint_memory"] = size.memory_bytes
        if size.labels:
            body["entrypoint_label_selector"] = dict(size.labels)
        await self._call(self._clusters[0], "POST", JOBS, body)

    async def state(self, name: str) -> AgentState:
        """Read the state and the log of a job. Raises `CannotLaunch`."""
        job = await self._call(self._clusters[0], "GET", f"{JOBS}{name}", may_miss=True)
        status = None if job is None else str(job["status"])
        if status in ENDED or status is None:  # it has ended, or Ray does not know it
            return AgentState(has_ended=True)
        if status == "PENDING":
            return AgentState()
        answer = await self._call(self._clusters[0], "GET", f"{JOBS}{name}/logs")
        return AgentState(str(answer["logs"] or ""))

    async def end(self, name: str) -> None:
        """Have a job stopped; its entry is deleted at a later start. Raises `CannotLaunch`."""
        await self._stop(self._clusters[0], name)

    async def begin(self, prefix: str, keep: Collection[str] = ()) -> None:
        """Check the first cluster; stop the other jobs with this name prefix on all clusters. Raises `CannotLaunch`.

        Another cluster that does not answer hinders no start: agents there end by themselves when they are alone.
        """
        await self.check()
        self._prefix = prefix
        for cluster in self._clusters:
            try:
                for name, status in await self._own_jobs(cluster):
                    if status not in ENDED and name not in keep:
                        await self._stop(cluster, name)
            except LauncherAway as error:
                if cluster is self._clusters[0]:
                    raise
                logger.warning("agents on %s are left to themselves: %s", cluster.url, error)

    async def _own_jobs(self, cluster: RayCluster) -> list[tuple[str, str]]:
        """Names and states of the jobs of this installation."""
        jobs = await self._call(cluster, "GET", JOBS)
        found = ((str(one.get("submission_id")), str(one.get("status"))) for one in jobs)
        return [one for one in found if self._prefix and one[0].startswith(self._prefix)]

    async def _stop(self, cluster: RayCluster, name: str) -> None:
        await self._call(cluster, "POST", f"{JOBS}{name}/stop", may_miss=True)

    async def _call(
        self,
        cluster: RayCluster,
        method: str,
        path: str,
        body: Any = None,
        *,
        may_miss: bool = False,
    ) -> Any:
        """Call the API and return its answer; None for a 404 if `may_miss`. Raises `CannotLaunch`."""
        headers = {"Authorization": f"Bearer {cluster.token}"}
        answer = await _answer(cluster, method, path, headers, body)
        if answer.status_code == HTTPStatus.NOT_FOUND and may_miss:
            return None
        if answer.status_code in REFUSES_STRANGERS:
            raise CannotLaunch("Ray refuses the token of TUNESHIP_RAY_TOKEN_FILE")
        if not answer.is_success:
            raise CannotLaunch(f"Ray refuses the call ({answer.status_code})")
        try:
            return answer.json()
        except ValueError as error:
            raise CannotLaunch("what answers at Ray's address is not its Jobs API") from error


async def _answer(
    cluster: RayCluster, method: str, path: str, headers: Mapping[str, str], body: Any = None
) -> httpx.Response:
    """Send a request, from a client for it alone: calls are rare, and none has to be closed with the service."""
    try:
        async with httpx.AsyncClient(verify=cluster.verify, trust_env=False) as client:
            return await client.request(
                method,
                f"{cluster.url}{path}",
                headers=headers,
                json=body,
                timeout=ANSWER_TIMEOUT_S,
            )
    except httpx.HTTPError as error:
        raise LauncherAway(f"Ray does not answer: {type(error).__name__}") from error
