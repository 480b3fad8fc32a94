"""The audit chain"""

from alembic import op
import sqlalchemy as sa

revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('jobs', sa.Column('tokens_per_second', sa.Float(), nullable=True))
    op.add_column('jobs', sa.Column('seconds_per_step', sa.Float(), nullable=True))
    op.create_index('ix_jobs_client_id_started_at', 'jobs', ['client_id', 'started_at'])
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
    sa.PrimaryKeyConstraint('seq', name=op.f('pk_audit'))
    )
    op.create_index('ix_audit_client_id_seq', 'audit', ['client_id', 'seq'])
