"""Decisions about canaries"""

from alembic import op
import sqlalchemy as sa

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('endpoints', sa.Column('pausable', sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column('endpoints', sa.Column('paused', sa.JSON(), nullable=True))
    op.add_column('endpoints', sa.Column('reverted', sa.JSON(), nullable=True))
