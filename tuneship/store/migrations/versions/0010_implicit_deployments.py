"""Deployments that the service made by itself, for a model that was asked by its name"""

from alembic import op
import sqlalchemy as sa

revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column(
        'deployments', sa.Column('implicit', sa.Boolean(), nullable=False, server_default=sa.false())
    )
