"""The first tables"""

from alembic import op
import sqlalchemy as sa

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    op.create_table('api_keys',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('secret_hash', sa.LargeBinary(), nullable=False),
    sa.Column('scopes', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('label', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('revoked_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_api_keys'))
    )
    op.create_table('datasets',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('description', sa.Text(), nullable=False),
    sa.Column('format', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('num_examples', sa.BigInteger(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('response_tokens', sa.BigInteger(), nullable=False),
    sa.Column('tokenizer', sa.Text(), nullable=False),
    sa.Column('source_datasets', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_datasets'))
    )
    op.create_index('ix_datasets_client_id_created_at_id', 'datasets', ['client_id', 'created_at', 'id'], unique=False)
    op.create_table('deployments',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('model_name', sa.Text(), nullable=False),
    sa.Column('deployment_name', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('compute_type', sa.Text(), nullable=False),
    sa.Column('instance_type', sa.Text(), nullable=False),
    sa.Column('region', sa.Text(), nullable=False),
    sa.Column('min_replicas', sa.BigInteger(), nullable=False),
    sa.Column('max_replicas', sa.BigInteger(), nullable=False),
    sa.Column('current_replicas', sa.BigInteger(), nullable=False),
    sa.Column('auto_scaling', sa.Boolean(), nullable=False),
    sa.Column('vpc_config', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('generation', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('security_settings', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('error', sa.JSON(none_as_null=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_deployments'))
    )
    op.create_index('ix_deployments_client_id_created_at_id', 'deployments', ['client_id', 'created_at', 'id'], unique=False)
    op.create_index('ix_deployments_status', 'deployments', ['status'], unique=False)
    op.create_table('endpoints',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('members', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('lease_seconds', sa.BigInteger(), nullable=True),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('lease_fallback', sa.JSON(none_as_null=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_endpoints'))
    )
    op.create_index('ix_endpoints_client_id_created_at_id', 'endpoints', ['client_id', 'created_at', 'id'], unique=False)
    op.create_table('events',
    sa.Column('position', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('resource_id', sa.Text(), nullable=False),
    sa.Column('sequence', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('data', sa.JSON(none_as_null=True), nullable=False),
    sa.PrimaryKeyConstraint('position', name=op.f('pk_events')),
    sa.UniqueConstraint('id', name=op.f('uq_events_id')),
    sa.UniqueConstraint('resource_id', 'sequence', name=op.f('uq_events_resource_id_sequence'))
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
    sa.PrimaryKeyConstraint('client_id', 'key', name=op.f('pk_idempotency'))
    )
    op.create_table('job_logs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('timestamp', sa.DateTime(timezone=True), nullable=False),
    sa.Column('level', sa.Text(), nullable=False),
    sa.Column('message', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_job_logs'))
    )
    op.create_index('ix_job_logs_job_id_id', 'job_logs', ['job_id', 'id'], unique=False)
    op.create_table('job_metrics',
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('training_loss', sa.Float(), nullable=False),
    sa.Column('validation_loss', sa.Float(), nullable=False),
    sa.Column('learning_rate', sa.Float(), nullable=False),
    sa.Column('epoch', sa.Float(), nullable=False),
    sa.Column('accuracy', sa.Float(), nullable=False),
    sa.Column('perplexity', sa.Float(), nullable=False),
    sa.PrimaryKeyConstraint('job_id', 'step', name=op.f('pk_job_metrics'))
    )
    op.create_table('jobs',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('base_model', sa.Text(), nullable=False),
    sa.Column('dataset_id', sa.Text(), nullable=False),
    sa.Column('validation_dataset_id', sa.Text(), nullable=True),
    sa.Column('fine_tuning_method', sa.Text(), nullable=False),
    sa.Column('model_name', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('hyperparameters', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('validation_frequency', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('compute_config', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('security_settings', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('fine_tuned_model', sa.Text(), nullable=True),
    sa.Column('started_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('current_epoch', sa.BigInteger(), nullable=False),
    sa.Column('total_epochs', sa.BigInteger(), nullable=False),
    sa.Column('current_step', sa.BigInteger(), nullable=False),
    sa.Column('total_steps', sa.BigInteger(), nullable=False),
    sa.Column('training_loss', sa.Float(), nullable=True),
    sa.Column('validation_loss', sa.Float(), nullable=True),
    sa.Column('error', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('owner', sa.Text(), nullable=True),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('attempts_without_progress', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_jobs'))
    )
    op.create_index('ix_jobs_client_id_created_at_id', 'jobs', ['client_id', 'created_at', 'id'], unique=False)
    op.create_index('ix_jobs_status', 'jobs', ['status'], unique=False)
    op.create_table('metric_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('window', sa.JSON(none_as_null=True), nullable=False),
    sa.PrimaryKeyConstraint('deployment_id', 'endpoint_id', 'start', name=op.f('pk_metric_windows'))
    )
    op.create_table('models',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('base_model', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('job_id', sa.Text(), nullable=False),
    sa.Column('fine_tuning_method', sa.Text(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.JSON(none_as_null=True), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_models'))
    )
    op.create_index('ix_models_client_id_created_at_id', 'models', ['client_id', 'created_at', 'id'], unique=False)


def downgrade():
    op.drop_index('ix_models_client_id_created_at_id', table_name='models')
    op.drop_table('models')
    op.drop_table('metric_windows')
    op.drop_index('ix_jobs_status', table_name='jobs')
    op.drop_index('ix_jobs_client_id_created_at_id', table_name='jobs')
    op.drop_table('jobs')
    op.drop_table('job_metrics')
    op.drop_index('ix_job_logs_job_id_id', table_name='job_logs')
    op.drop_table('job_logs')
    op.drop_table('idempotency')
    op.drop_table('events')
    op.drop_index('ix_endpoints_client_id_created_at_id', table_name='endpoints')
    op.drop_table('endpoints')
    op.drop_index('ix_deployments_status', table_name='deployments')
    op.drop_index('ix_deployments_client_id_created_at_id', table_name='deployments')
    op.drop_table('deployments')
    op.drop_index('ix_datasets_client_id_created_at_id', table_name='datasets')
    op.drop_table('datasets')
    op.drop_table('api_keys')
