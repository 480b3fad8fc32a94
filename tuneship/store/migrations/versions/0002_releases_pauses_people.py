"""Releases and their lines, what a person decided about a canary, and who a key stands for."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = '0002', '0001', None, None


def upgrade():
    for table in ('api_keys', 'audit', 'unlinked_audit'):
        op.add_column(table, sa.Column('person', sa.JSON(), nullable=True))
    op.add_column('endpoints', sa.Column('pausable', sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column('endpoints', sa.Column('paused', sa.JSON(), nullable=True))
    op.add_column('endpoints', sa.Column('reverted', sa.JSON(), nullable=True))
    op.create_table('release_lines',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('release_id', sa.Text(), nullable=False),
    sa.Column('record', sa.Text(), nullable=False),
    sa.Column('number', sa.BigInteger(), nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('line', sa.LargeBinary(), nullable=False),
    sa.Column('point', sa.JSON(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_release_lines'),
    sa.UniqueConstraint('release_id', 'record', 'number', name='uq_release_lines_release_id_record_number')
    )
    op.create_index('ix_release_lines_release_id_id', 'release_lines', ['release_id', 'id'])
    op.create_table('releases',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(), nullable=False),
    sa.Column('run_key', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('stage', sa.Text(), nullable=False),
    sa.Column('announced_by', sa.Text(), nullable=False),
    sa.Column('model_name', sa.Text(), nullable=True),
    sa.Column('endpoint_name', sa.Text(), nullable=True),
    sa.Column('endpoint_id', sa.Text(), nullable=True),
    sa.Column('job_id', sa.Text(), nullable=True),
    sa.Column('baseline_deployment_id', sa.Text(), nullable=True),
    sa.Column('candidate_deployment_id', sa.Text(), nullable=True),
    sa.Column('evaluation_id', sa.Text(), nullable=True),
    sa.Column('candidate_percentage', sa.BigInteger(), nullable=True),
    sa.Column('outcome', sa.Text(), nullable=True),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.Column('question', sa.JSON(), nullable=True),
    sa.Column('links', sa.JSON(), nullable=False),
    sa.Column('ended_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('records', sa.JSON(), nullable=False),
    sa.Column('line_count', sa.BigInteger(), nullable=False),
    sa.Column('security_settings', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_releases'),
    sa.UniqueConstraint('client_id', 'run_key', name='uq_releases_client_id_run_key')
    )
    op.create_index('ix_releases_client_id_created_at_id', 'releases', ['client_id', 'created_at', 'id'])
    op.create_index('ix_releases_client_id_status_created_at_id', 'releases', ['client_id', 'status', 'created_at', 'id'])
