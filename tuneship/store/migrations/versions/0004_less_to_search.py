"""Indexes for what is looked for while others wait"""

from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None


def upgrade():
    op.create_index('ix_deliveries_event_id', 'deliveries', ['event_id'])
    op.create_index('ix_endpoints_lease_until', 'endpoints', ['lease_until'])
    op.create_index('ix_idempotency_created_at', 'idempotency', ['created_at'])
