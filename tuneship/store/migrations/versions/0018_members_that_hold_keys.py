"""The member of a cluster that works on an idempotency key"""

from alembic import op
import sqlalchemy as sa

revision = '0018'
down_revision = '0017'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('idempotency', sa.Column('member', sa.BigInteger(), nullable=True))
