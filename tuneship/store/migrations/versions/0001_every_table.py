"""Every table"""

from alembic import op
import sqlalchemy as sa

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    is_postgres = op.get_bind().dialect.name == 'postgresql'
    # The oldest version that can work with the schema, which Alembic's own number does not say.
    op.add_column('alembic_version', sa.Column('works_with', sa.Text()))
    op.create_table('agents',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('digest', sa.Text(), nullable=False),
    sa.Column('number', sa.BigInteger(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('host', sa.Text(), nullable=True),
    sa.Column('port', sa.BigInteger(), nullable=True),
    sa.Column('certificate', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('name', name='pk_agents')
    )
    op.create_table('api_keys',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('secret_hash', sa.LargeBinary(), nullable=False),
    sa.Column('scopes', sa.JSON(), nullable=False),
    sa.Column('label', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('revoked_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('last_used_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_api_keys')
    )
    op.create_table('console_sessions',
    sa.Column('digest', sa.LargeBinary(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key_id', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('looks_only', sa.Boolean(), nullable=False),
    sa.Column('used_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('digest', name='pk_console_sessions')
    )
    op.create_index('ix_console_sessions_expires_at', 'console_sessions', ['expires_at'], unique=False)
    op.create_table('sign_in_links',
    sa.Column('digest', sa.LargeBinary(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key_id', sa.Text(), nullable=False),
    sa.Column('is_local', sa.Boolean(), nullable=False),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('digest', name='pk_sign_in_links')
    )
    op.create_table('audit',
    sa.Column('seq', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key_id', sa.Text(), nullable=False),
    sa.Column('action', sa.Text(), nullable=False),
    sa.Column('resource_id', sa.Text(), nullable=True),
    sa.Column('status', sa.Integer(), nullable=False),
    sa.Column('address', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=True),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=True),
    sa.Column('mac', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('seq', name='pk_audit')
    )
    op.create_index('ix_audit_client_id_seq', 'audit', ['client_id', 'seq'])
    op.create_table('batch_files',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('purpose', sa.Text(), nullable=False),
    sa.Column('batch_id', sa.Text(), nullable=True),
    sa.Column('position', sa.BigInteger(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.Column('came_safely', sa.Boolean(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_batch_files')
    )
    op.create_index('ix_batch_files_batch_id_position', 'batch_files', ['batch_id', 'position'])
    op.create_index('ix_batch_files_client_id_created_at_id', 'batch_files', ['client_id', 'created_at', 'id'])
    op.create_table('batches',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('endpoint', sa.Text(), nullable=False),
    sa.Column('input_file_id', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('caller', sa.JSON(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.Column('total', sa.BigInteger(), nullable=False),
    sa.Column('completed', sa.BigInteger(), nullable=False),
    sa.Column('failed', sa.BigInteger(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=False),
    sa.Column('model', sa.Text(), nullable=True),
    sa.Column('errors', sa.JSON(), nullable=True),
    sa.Column('output_file_id', sa.Text(), nullable=True),
    sa.Column('error_file_id', sa.Text(), nullable=True),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('in_progress_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('finalizing_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('failed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('expired_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('cancelling_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('cancelled_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_batches')
    )
    op.create_index('ix_batches_client_id_created_at_id', 'batches', ['client_id', 'created_at', 'id'])
    op.create_index('ix_batches_status', 'batches', ['status'])
    op.create_table('datasets',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('description', sa.Text(), nullable=False),
    sa.Column('format', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('num_examples', sa.BigInteger(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('response_tokens', sa.BigInteger(), nullable=False),
    sa.Column('tokenizer', sa.Text(), nullable=False),
    sa.Column('source_datasets', sa.JSON(), nullable=True),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.Column('duplicate_examples', sa.BigInteger(), nullable=True),
    sa.Column('came_safely', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.Column('error', sa.JSON(), nullable=True),
    sa.Column('suggestions', sa.JSON(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_datasets')
    )
    op.create_index('ix_datasets_client_id_created_at_id', 'datasets', ['client_id', 'created_at', 'id'])
    op.create_index('ix_datasets_status', 'datasets', ['status'])
    op.create_table('deliveries',
    sa.Column('webhook_id', sa.Text(), nullable=False),
    sa.Column('event_id', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('attempts', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('next_attempt_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('response_status', sa.Integer(), nullable=True),
    sa.Column('failure', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('webhook_id', 'event_id', name='pk_deliveries')
    )
    op.create_index('ix_deliveries_event_id', 'deliveries', ['event_id'])
    op.create_index('ix_deliveries_webhook_id_created_at_event_id', 'deliveries', ['webhook_id', 'created_at', 'event_id'])
    op.create_index('ix_deliveries_webhook_id_next_attempt_at', 'deliveries', ['webhook_id', 'next_attempt_at'])
    op.create_table('deployment_logs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('timestamp', sa.DateTime(timezone=True), nullable=False),
    sa.Column('level', sa.Text(), nullable=False),
    sa.Column('component', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=True),
    sa.Column('message', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_deployment_logs')
    )
    op.create_index('ix_deployment_logs_deployment_id_timestamp_id', 'deployment_logs', ['deployment_id', 'timestamp', 'id'])
    op.create_table('deployments',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('model_name', sa.Text(), nullable=False),
    sa.Column('deployment_name', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('compute_type', sa.Text(), nullable=False),
    sa.Column('instance_type', sa.Text(), nullable=False),
    sa.Column('region', sa.Text(), nullable=False),
    sa.Column('min_replicas', sa.BigInteger(), nullable=False),
    sa.Column('max_replicas', sa.BigInteger(), nullable=False),
    sa.Column('current_replicas', sa.BigInteger(), nullable=False),
    sa.Column('wanted_replicas', sa.BigInteger(), nullable=True),
    sa.Column('is_forced', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.Column('auto_scaling', sa.Boolean(), nullable=False),
    sa.Column('vpc_config', sa.JSON(), nullable=True),
    sa.Column('generation', sa.JSON(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.Column('error', sa.JSON(), nullable=True),
    sa.Column('health', sa.Text(), server_default='unknown', nullable=False),
    sa.Column('implicit', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_deployments')
    )
    op.create_index('ix_deployments_client_id_created_at_id', 'deployments', ['client_id', 'created_at', 'id'])
    op.create_index('ix_deployments_client_id_status', 'deployments', ['client_id', 'status'])
    op.create_index('ix_deployments_status', 'deployments', ['status'])
    op.create_table('endpoints',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('members', sa.JSON(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('lease_seconds', sa.BigInteger(), nullable=True),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('lease_fallback', sa.JSON(), nullable=True),
    sa.Column('rollout_id', sa.Text(), nullable=True),
    sa.Column('large_keys', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_endpoints')
    )
    op.create_index('ix_endpoints_client_id_created_at_id', 'endpoints', ['client_id', 'created_at', 'id'])
    op.create_index('ix_endpoints_lease_until', 'endpoints', ['lease_until'])
    op.create_table('evals',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('data_source_config', sa.JSON(), nullable=False),
    sa.Column('testing_criteria', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_evals')
    )
    op.create_index('ix_evals_client_id_created_at_id', 'evals', ['client_id', 'created_at', 'id'])
    op.create_table('evaluation_scores',
    sa.Column('evaluation_id', sa.Text(), nullable=False),
    sa.Column('position', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('results', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('evaluation_id', 'position', name='pk_evaluation_scores')
    )
    op.create_table('evaluations',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('dataset_id', sa.Text(), nullable=False),
    sa.Column('dataset_sha256', sa.Text(), nullable=False),
    sa.Column('candidate', sa.Text(), nullable=False),
    sa.Column('baseline', sa.Text(), nullable=True),
    sa.Column('candidate_model', sa.Text(), nullable=False),
    sa.Column('baseline_model', sa.Text(), nullable=True),
    sa.Column('settings', sa.JSON(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('caller', sa.JSON(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.Column('selected', sa.BigInteger(), nullable=True),
    sa.Column('leaked_lines', sa.JSON(), nullable=True),
    sa.Column('leaks_checked', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.Column('answered', sa.BigInteger(), nullable=False),
    sa.Column('report', sa.JSON(), nullable=False),
    sa.Column('verdict', sa.Text(), nullable=True),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.Column('stopped_early', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.Column('used_before', sa.BigInteger(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=False),
    sa.Column('error', sa.JSON(), nullable=True),
    sa.Column('started_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('eval_id', sa.Text(), nullable=True),
    sa.Column('eval_run', sa.JSON(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_evaluations')
    )
    op.create_index('ix_evaluations_client_id_created_at_id', 'evaluations', ['client_id', 'created_at', 'id'])
    op.create_index('ix_evaluations_client_id_dataset_sha256', 'evaluations', ['client_id', 'dataset_sha256'])
    op.create_index('ix_evaluations_eval_id', 'evaluations', ['eval_id'])
    op.create_index('ix_evaluations_status', 'evaluations', ['status'])
    op.create_table('events',
    sa.Column('position', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('resource_id', sa.Text(), nullable=False),
    sa.Column('sequence', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('data', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('position', name='pk_events'),
    sa.UniqueConstraint('id', name='uq_events_id'),
    sa.UniqueConstraint('resource_id', 'sequence', name='uq_events_resource_id_sequence')
    )
    op.create_index('ix_events_client_id_position', 'events', ['client_id', 'position'])
    op.create_table('failed_starts',
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('total', sa.BigInteger(), nullable=False),
    sa.Column('in_a_row', sa.BigInteger(), nullable=False),
    sa.Column('error', sa.Text(), nullable=False),
    sa.Column('paused_until', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('base', name='pk_failed_starts')
    )
    op.create_table('finer_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('width', sa.BigInteger(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('shard', sa.BigInteger(), nullable=False),
    sa.Column('counts', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('deployment_id', 'endpoint_id', 'width', 'start', 'shard', name='pk_finer_windows'),
    sqlite_with_rowid=False
    )
    op.create_table('idempotency',
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key', sa.Text(), nullable=False),
    sa.Column('fingerprint', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=False),
    sa.Column('status', sa.Integer(), nullable=True),
    sa.Column('location', sa.Text(), nullable=True),
    sa.Column('body', sa.LargeBinary(), nullable=True),
    sa.Column('member', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('client_id', 'key', name='pk_idempotency')
    )
    op.create_index('ix_idempotency_created_at', 'idempotency', ['created_at'])
    op.create_table('installation',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('starts', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('key_check', sa.LargeBinary(), nullable=True),
    sa.Column('newest_time', sa.DateTime(timezone=True), nullable=True),
    sa.Column('cluster', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_installation')
    )
    op.create_table('job_logs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('timestamp', sa.DateTime(timezone=True), nullable=False),
    sa.Column('level', sa.Text(), nullable=False),
    sa.Column('message', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_job_logs')
    )
    op.create_index('ix_job_logs_job_id_id', 'job_logs', ['job_id', 'id'])
    op.create_table('job_metrics',
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('training_loss', sa.Float(), nullable=False),
    sa.Column('validation_loss', sa.Float(), nullable=False),
    sa.Column('learning_rate', sa.Float(), nullable=False),
    sa.Column('epoch', sa.Float(), nullable=False),
    sa.Column('accuracy', sa.Float(), nullable=False),
    sa.Column('perplexity', sa.Float(), nullable=False),
    sa.Column('evaluated', sa.Boolean(), server_default=sa.false(), nullable=False),
    sa.Column('log_id', sa.BigInteger(), server_default='0', nullable=False),
    sa.PrimaryKeyConstraint('job_id', 'step', name='pk_job_metrics')
    )
    op.create_index('ix_job_metrics_job_id_step_measured', 'job_metrics', ['job_id', 'step'], sqlite_where=sa.text('evaluated = 1'), postgresql_where=sa.text('evaluated'))
    op.create_index('ix_job_metrics_job_id_validation_loss_step_measured', 'job_metrics', ['job_id', 'validation_loss', 'step'], sqlite_where=sa.text('evaluated = 1'), postgresql_where=sa.text('evaluated'))
    op.create_table('job_row_losses',
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('losses', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('job_id', name='pk_job_row_losses')
    )
    op.create_table('jobs',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('base_model', sa.Text(), nullable=False),
    sa.Column('dataset_id', sa.Text(), nullable=False),
    sa.Column('validation_dataset_id', sa.Text(), nullable=True),
    sa.Column('fine_tuning_method', sa.Text(), nullable=False),
    sa.Column('model_name', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('hyperparameters', sa.JSON(), nullable=False),
    sa.Column('validation_frequency', sa.JSON(), nullable=False),
    sa.Column('compute_config', sa.JSON(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.Column('comparison', sa.JSON(), nullable=True),
    sa.Column('fine_tuned_model', sa.Text(), nullable=True),
    sa.Column('started_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('current_epoch', sa.BigInteger(), nullable=False),
    sa.Column('total_epochs', sa.BigInteger(), nullable=False),
    sa.Column('current_step', sa.BigInteger(), nullable=False),
    sa.Column('total_steps', sa.BigInteger(), nullable=False),
    sa.Column('training_loss', sa.Float(), nullable=True),
    sa.Column('validation_loss', sa.Float(), nullable=True),
    sa.Column('tokens_per_second', sa.Float(), nullable=True),
    sa.Column('seconds_per_step', sa.Float(), nullable=True),
    sa.Column('ends_learnt', sa.Float(), nullable=True),
    sa.Column('devices', sa.JSON(), nullable=True),
    sa.Column('error', sa.JSON(), nullable=True),
    sa.Column('owner', sa.Text(), nullable=True),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('attempts_without_progress', sa.BigInteger(), nullable=False),
    sa.Column('epochs_told', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('progress_attempt', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('progress_offset', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('checkpoint', sa.JSON(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_jobs')
    )
    op.create_index('ix_jobs_client_id_created_at_id', 'jobs', ['client_id', 'created_at', 'id'])
    op.create_index('ix_jobs_client_id_started_at', 'jobs', ['client_id', 'started_at'])
    op.create_index('ix_jobs_client_id_status_created_at_id', 'jobs', ['client_id', 'status', 'created_at', 'id'])
    op.create_index('ix_jobs_status', 'jobs', ['status'])
    op.create_table('leader_leases',
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('role', name='pk_leader_leases')
    )
    op.create_table('leaders',
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('owner', sa.Text(), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('role', name='pk_leaders')
    )
    op.create_table('member_ages',
    sa.Column('member', sa.Text(), nullable=False),
    sa.Column('written_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('ages', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('member', name='pk_member_ages'),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
    op.create_table('member_demands',
    sa.Column('member', sa.Text(), nullable=False),
    sa.Column('written_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('lapses_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('demand', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('member', name='pk_member_demands'),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
    op.create_table('metric_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('width', sa.BigInteger(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('shard', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('window', sa.LargeBinary(), nullable=False),
    sa.Column('minutes', sa.LargeBinary(), nullable=True),
    sa.PrimaryKeyConstraint('deployment_id', 'endpoint_id', 'width', 'start', 'shard', name='pk_metric_windows'),
    sqlite_with_rowid=False
    )
    op.create_index('ix_metric_windows_shards', 'metric_windows', ['width', 'start'], sqlite_where=sa.text('shard <> 0'), postgresql_where=sa.text('shard <> 0'))
    op.create_index('ix_metric_windows_width_start', 'metric_windows', ['width', 'start'])
    op.create_table('models',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('base_model', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('job_id', sa.Text(), nullable=True),
    sa.Column('fine_tuning_method', sa.Text(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.JSON(), nullable=False),
    sa.Column('ends_learnt', sa.Float(), nullable=True),
    sa.Column('appended_end', sa.Text(), nullable=True),
    sa.Column('imported_bytes', sa.BigInteger(), server_default='0', nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_models')
    )
    op.create_index('ix_models_client_id_created_at_id', 'models', ['client_id', 'created_at', 'id'])
    op.create_table('object_keys',
    sa.Column('object_id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('wrapped', sa.LargeBinary(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('object_id', name='pk_object_keys')
    )
    op.create_table('rate_windows',
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('ends', sa.BigInteger(), nullable=False),
    sa.Column('taken', sa.BigInteger(), nullable=False),
    sa.Column('chunk', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('client_id', 'kind', 'ends', name='pk_rate_windows'),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
    op.create_table('unlinked_audit',
    sa.Column('position', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key_id', sa.Text(), nullable=False),
    sa.Column('action', sa.Text(), nullable=False),
    sa.Column('resource_id', sa.Text(), nullable=True),
    sa.Column('status', sa.Integer(), nullable=False),
    sa.Column('address', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=True),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=True),
    sa.Column('mac', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('position', name='pk_unlinked_audit')
    )
    op.create_table('webhooks',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('url', sa.Text(), nullable=False),
    sa.Column('description', sa.Text(), nullable=False),
    sa.Column('events', sa.JSON(), nullable=False),
    sa.Column('profile', sa.Text(), server_default='tuneship', nullable=False),
    sa.Column('active', sa.Boolean(), nullable=False),
    sa.Column('secret', sa.LargeBinary(), nullable=False),
    sa.Column('previous_secret', sa.LargeBinary(), nullable=True),
    sa.Column('previous_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('failing_since', sa.DateTime(timezone=True), nullable=True),
    sa.Column('disabled_reason', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_webhooks')
    )
    op.create_index('ix_webhooks_client_id_created_at_id', 'webhooks', ['client_id', 'created_at', 'id'])
