"""The resources of both clients and their verbs, one for each declared operation (a guard test compares them)."""

from collections.abc import AsyncGenerator, Generator

from tuneship.client.pages import by_after, by_next_token
from tuneship.client.verbs import AsyncResource, Pages, Streamed, SyncResource, Verb
from tuneship.contract import (
    audit,
    datasets,
    deployments,
    endpoints,
    events,
    generation,
    instances,
    jobs,
    metrics,
    models,
    webhooks,
)
from tuneship.contract.jobs import JobLogEntry, JobStep


class _Datasets:
    validate = Verb(datasets.validate_dataset)
    upload = Verb(datasets.upload_dataset)
    get = Verb(datasets.get_dataset)
    list = Verb(datasets.list_datasets)
    iterate = Pages(datasets.list_datasets, lambda page: page.datasets)
    merge = Verb(datasets.merge_datasets)
    delete = Verb(datasets.delete_dataset)


class _Jobs:
    create = Verb(jobs.create_job)
    get = Verb(jobs.get_job)
    list = Verb(jobs.list_jobs)
    iterate = Pages(jobs.list_jobs, lambda page: page.jobs)
    cancel = Verb(jobs.cancel_job)
    metrics = Verb(jobs.get_job_metrics)
    logs = Verb(jobs.get_job_logs)
    iterate_logs = Pages(jobs.get_job_logs, lambda page: page.logs, by_after)


class _InstanceTypes:
    list = Verb(instances.list_instance_types)


class _Models:
    list = Verb(models.list_models)
    iterate = Pages(models.list_models, lambda page: page.models)
    get = Verb(models.get_model)
    limits = Verb(models.get_model_limits)
    delete = Verb(models.delete_model)


class _Deployments:
    create = Verb(deployments.create_deployment)
    get = Verb(deployments.get_deployment)
    list = Verb(deployments.list_deployments)
    iterate = Pages(deployments.list_deployments, lambda page: page.deployments)
    update = Verb(deployments.update_deployment)
    delete = Verb(deployments.delete_deployment)
    metrics = Verb(metrics.get_deployment_metrics)
    logs = Verb(deployments.get_deployment_logs)
    iterate_logs = Pages(deployments.get_deployment_logs, lambda page: page.logs, by_next_token)
    generate = Verb(generation.generate)
    stream = Streamed(generation.generate)


class _Endpoints:
    create = Verb(endpoints.create_endpoint)
    get = Verb(endpoints.get_endpoint)
    list = Verb(endpoints.list_endpoints)
    iterate = Pages(endpoints.list_endpoints, lambda page: page.endpoints)
    update = Verb(endpoints.update_endpoint)
    delete = Verb(endpoints.delete_endpoint)
    generate = Verb(generation.generate_by_endpoint)
    stream = Streamed(generation.generate_by_endpoint)


class _CanaryEndpoints:
    create = Verb(endpoints.create_canary_endpoint)
    get = Verb(endpoints.get_canary_endpoint)
    list = Verb(endpoints.list_canary_endpoints)
    iterate = Pages(endpoints.list_canary_endpoints, lambda page: page.canary_endpoints)
    update = Verb(endpoints.update_canary_endpoint)
    delete = Verb(endpoints.delete_canary_endpoint)
    renew_lease = Verb(endpoints.renew_canary_lease)
    generate = Verb(generation.generate_by_endpoint)
    stream = Streamed(generation.generate_by_endpoint)


class _Webhooks:
    create = Verb(webhooks.create_webhook)
    get = Verb(webhooks.get_webhook)
    list = Verb(webhooks.list_webhooks)
    iterate = Pages(webhooks.list_webhooks, lambda page: page.webhooks)
    update = Verb(webhooks.update_webhook)
    delete = Verb(webhooks.delete_webhook)
    rotate_secret = Verb(webhooks.rotate_webhook_secret)
    test = Verb(webhooks.send_test_event)
    deliveries = Verb(webhooks.list_webhook_deliveries)
    iterate_deliveries = Pages(webhooks.list_webhook_deliveries, lambda page: page.deliveries)
    retry = Verb(webhooks.retry_webhook_delivery)
    replay = Verb(webhooks.replay_webhook)


class _Events:
    list = Verb(events.list_events)
    iterate = Pages(events.list_events, lambda page: page.events, by_after)


class _Audit:
    list = Verb(audit.list_audit)
    iterate = Pages(audit.list_audit, lambda page: page.entries, by_after)


class Datasets(_Datasets, SyncResource): ...


class Jobs(_Jobs, SyncResource):
    def follow_logs(
        self, job_id: str, after: str | None = None
    ) -> Generator[JobLogEntry | JobStep]:
        """Log lines and training steps as they are written, over broken connections, to the job's end."""
        return self.client.follow_job(job_id, after)


class InstanceTypeResource(_InstanceTypes, SyncResource): ...


class Models(_Models, SyncResource): ...


class Deployments(_Deployments, SyncResource): ...


class Endpoints(_Endpoints, SyncResource): ...


class CanaryEndpoints(_CanaryEndpoints, SyncResource): ...


class Webhooks(_Webhooks, SyncResource): ...


class Events(_Events, SyncResource): ...


class Audit(_Audit, SyncResource): ...


class AsyncDatasets(_Datasets, AsyncResource): ...


class AsyncJobs(_Jobs, AsyncResource):
    def follow_logs(
        self, job_id: str, after: str | None = None
    ) -> AsyncGenerator[JobLogEntry | JobStep]:
        """The same; `contextlib.aclosing` it to close the connection when leaving early."""
        return self.client.follow_job(job_id, after)


class AsyncInstanceTypes(_InstanceTypes, AsyncResource): ...


class AsyncModels(_Models, AsyncResource): ...


class AsyncDeployments(_Deployments, AsyncResource): ...


class AsyncEndpoints(_Endpoints, AsyncResource): ...


class AsyncCanaryEndpoints(_CanaryEndpoints, AsyncResource): ...


class AsyncWebhooks(_Webhooks, AsyncResource): ...


class AsyncEvents(_Events, AsyncResource): ...


class AsyncAudit(_Audit, AsyncResource): ...
