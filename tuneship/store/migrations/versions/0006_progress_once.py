"""How much of a job's progress is stored, so that a line is stored once whoever dies"""

from alembic import op
import sqlalchemy as sa

revision = '0006'
down_revision = '0005'
branch_labels = None
depends_on = None


def upgrade():
    for name in ('progress_attempt', 'progress_offset'):
        op.add_column('jobs', sa.Column(name, sa.BigInteger(), nullable=False, server_default='0'))
