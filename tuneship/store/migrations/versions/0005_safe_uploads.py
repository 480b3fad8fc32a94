"""How a dataset came: what an earlier version took may have come over plain HTTP"""

from alembic import op
import sqlalchemy as sa

revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column(
        'datasets', sa.Column('came_safely', sa.Boolean(), nullable=False, server_default=sa.false())
    )
