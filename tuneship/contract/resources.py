"""The whole API: the one list of its resources. The clients and the OpenAPI document are made from it.

A new operation in a resource that exists needs no line here.
"""

from typing import Generic, TypeVar

from tuneship.contract import (
    api_keys,
    audit,
    datasets,
    deployments,
    embeddings,
    endpoints,
    evaluations,
    events,
    generation,
    instances,
    jobs,
    metrics,
    models,
    monitoring,
    releases,
    sign_in_links,
    webhooks,
)
from tuneship.contract.declaring.verbs import Asynchronous, Blocking

C = TypeVar("C", bound=Blocking | Asynchronous)

# Every file of the contract that declares operations, in reading order, with its text in the
# OpenAPI document.
SECTIONS = {
    datasets: "Upload, validate, list, fetch, combine and delete training data.",
    jobs: "Fine-tuning jobs, their metrics and their logs, also as a stream.",
    models: "Base models and fine-tuned ones.",
    deployments: "Models that answer requests.",
    metrics: "Latency, throughput, errors and tokens of a deployment.",
    endpoints: "Addresses in front of deployments; canary endpoints split their traffic.",
    generation: "Text from a deployment or through an endpoint.",
    embeddings: "Vectors of texts, from a deployment or through an endpoint.",
    evaluations: "Verdicts on the answers of deployments, from held-out examples.",
    releases: "What pipelines record about a release, and what a person decides.",
    webhooks: "Receivers of events, and what became of each event there.",
    events: "What happened in the last 30 days.",
    instances: "Where work can run.",
    audit: "Who did what, signed row by row.",
    api_keys: "The keys of the tenant, without their secrets.",
    sign_in_links: "Links that sign a person in to the console.",
    monitoring: "What the service counts and measures, for Prometheus.",
}


class Api(Generic[C]):
    """The resources of a client, by the names that its users see: `client.jobs`, `client.datasets`, ..."""

    def _bind_resources(self, client: C) -> None:
        self.datasets = datasets.Datasets(client)
        self.jobs = jobs.Jobs(client)
        self.instance_types = instances.InstanceTypeResource(client)
        self.models = models.Models(client)
        self.deployments = deployments.Deployments(client)
        self.endpoints = endpoints.Endpoints(client)
        self.canary_endpoints = endpoints.CanaryEndpoints(client)
        self.evaluations = evaluations.Evaluations(client)
        self.releases = releases.Releases(client)
        self.webhooks = webhooks.Webhooks(client)
        self.events = events.Events(client)
        self.audit = audit.Audit(client)
        self.api_keys = api_keys.ApiKeys(client)
        self.sign_in_links = sign_in_links.SignInLinks(client)
        self.monitoring = monitoring.Monitoring(client)
