"""The starts of replicas that have failed, of which the members of a cluster hear by rows"""

from alembic import op
import sqlalchemy as sa

revision = '0019'
down_revision = '0018'
branch_labels = None
depends_on = None


def upgrade():
    op.create_table('failed_starts',
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('total', sa.BigInteger(), nullable=False),
    sa.Column('in_a_row', sa.BigInteger(), nullable=False),
    sa.Column('error', sa.Text(), nullable=False),
    sa.Column('paused_until', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('base', name=op.f('pk_failed_starts'))
    )
