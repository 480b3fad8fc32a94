"""The parts of the service that requests may need. Handlers reach them by their `Context`."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from tuneship.conversion.running import Convert, convert_in_process
from tuneship.events.connector import Receivers
from tuneship.metrics.recorder import Recorder
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.security.vault import Vault
from tuneship.service.access.capabilities import Capabilities
from tuneship.service.access.console_sessions import ConsoleSessions
from tuneship.service.access.data_keys import Keyring
from tuneship.service.access.signed_audit import SignedAudit
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.service.context.cursors import Cursors
from tuneship.service.context.drain import Drain
from tuneship.service.context.fair_threads import RequestThreads
from tuneship.service.context.notifier import Notifier
from tuneship.service.context.staged_bytes import StagedBytes
from tuneship.service.context.timing import ServiceTiming
from tuneship.service.telemetry.in_flight import InFlightGenerations
from tuneship.service.telemetry.log_recorder import LogRecorder
from tuneship.service.telemetry.request_counts import RequestCounts
from tuneship.service.telemetry.tracing import Tracing
from tuneship.settings import ServiceSettings
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.database.database import Database
from tuneship.store.files.blobs import Blobs
from tuneship.store.records.audit import Chain
from tuneship.store.records.audit_heads import Heads
from tuneship.traffic.large_keys import LargeKeys


@dataclass(frozen=True)
class Parts:
    """Built once, in `service/serve.py`."""

    settings: ServiceSettings
    public_url: str
    database: Database
    blobs: Blobs
    catalogue: Catalogue
    recorder: Recorder
    replicas: ReplicaGroups
    cursors: Cursors
    # The rules for webhook receivers that may be called.
    receivers: Receivers
    vault: Vault
    keyring: Keyring
    audit: Chain
    audit_heads: Heads
    sessions: ConsoleSessions
    # The current UTC moment.
    clock: Callable[[], datetime]
    capabilities: Capabilities
    # A random number in [0, 10000) for the split.
    draw: Callable[[], int]
    convert: Convert = convert_in_process
    timing: ServiceTiming = field(default_factory=ServiceTiming)
    instances: InstanceCatalogue = field(default_factory=InstanceCatalogue)
    in_flight: InFlightGenerations = field(default_factory=InFlightGenerations)
    large_keys: LargeKeys = field(default_factory=LargeKeys)
    deployment_log: LogRecorder = field(default_factory=LogRecorder)
    # The number of this process among the members of a cluster: its shard of stored metrics, its idempotency keys.
    member_number: int = ALONE
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    signed_audit: SignedAudit = field(default_factory=SignedAudit)
    staged_bytes: StagedBytes = field(default_factory=StagedBytes)
    # Takes the spans of requests and jobs; None where no collector is set.
    tracing: Tracing | None = None
    notifier: Notifier = field(default_factory=Notifier)
    drain: Drain = field(default_factory=Drain)
    threads: RequestThreads = field(default_factory=RequestThreads)
    # Set when the service ends, so that the reading of a big file stops.
    halted: threading.Event = field(default_factory=threading.Event)
