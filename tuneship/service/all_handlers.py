"""Imports the modules of all handlers, which binds them to the declared operations."""

from tuneship.service.console import handlers as console
from tuneship.service.context.bindings import SERVED
from tuneship.service.datasets import handlers as datasets
from tuneship.service.datasets import merging as dataset_merging
from tuneship.service.deployments import handlers as deployments
from tuneship.service.deployments import logs as deployment_logs
from tuneship.service.deployments import metrics
from tuneship.service.endpoints import handlers as endpoints
from tuneship.service.evaluations import handlers as evaluations
from tuneship.service.events import api_keys, audit, webhooks
from tuneship.service.events import handlers as events
from tuneship.service.generation import embedding_handlers as embeddings
from tuneship.service.generation import handlers as generation
from tuneship.service.jobs import handlers as jobs
from tuneship.service.models import content as model_content
from tuneship.service.models import handlers as models
from tuneship.service.models import instances
from tuneship.service.monitoring import handlers as monitoring
from tuneship.service.openai import batches as openai_batches
from tuneship.service.openai import embeddings as openai_embeddings
from tuneship.service.openai import eval_runs as openai_eval_runs
from tuneship.service.openai import evals as openai_evals
from tuneship.service.openai import files as openai_files
from tuneship.service.openai import generation as openai_generation
from tuneship.service.openai import jobs as openai_jobs
from tuneship.service.openai import models as openai_models
from tuneship.service.openai import responses as openai_responses
from tuneship.service.openai import webhooks as openai_webhooks
from tuneship.service.openai.bindings import OPENAI_SERVED
from tuneship.service.releases import handlers as releases

RESOURCES = (
    api_keys,
    audit,
    console,
    dataset_merging,
    datasets,
    deployment_logs,
    deployments,
    embeddings,
    endpoints,
    evaluations,
    events,
    generation,
    instances,
    jobs,
    metrics,
    model_content,
    models,
    monitoring,
    openai_batches,
    openai_embeddings,
    openai_eval_runs,
    openai_evals,
    openai_files,
    openai_generation,
    openai_jobs,
    openai_models,
    openai_responses,
    openai_webhooks,
    releases,
    webhooks,
)

__all__ = ["OPENAI_SERVED", "RESOURCES", "SERVED"]
