"""Indexes for what is looked for while others wait; the wrapped keys of sealed files"""

from alembic import op
import sqlalchemy as sa

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None


def upgrade():
    op.create_index('ix_deliveries_event_id', 'deliveries', ['event_id'])
    op.create_index('ix_endpoints_lease_until', 'endpoints', ['lease_until'])
    op.create_index('ix_idempotency_created_at', 'idempotency', ['created_at'])
    op.create_table('object_keys',
    sa.Column('object_id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('wrapped', sa.LargeBinary(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('object_id', name=op.f('pk_object_keys'))
    )
