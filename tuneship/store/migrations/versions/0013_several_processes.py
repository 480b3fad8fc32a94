"""Several processes on one database: who leads them, and the name of their cluster"""

from alembic import op
import sqlalchemy as sa

revision = '0013'
down_revision = '0012'
branch_labels = None
depends_on = None


def upgrade():
    op.create_table('leaders',
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('owner', sa.Text(), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('role', name=op.f('pk_leaders'))
    )
    op.create_table('leader_leases',
    sa.Column('role', sa.Text(), nullable=False),
    sa.Column('epoch', sa.BigInteger(), nullable=False),
    sa.Column('lease_until', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('role', name=op.f('pk_leader_leases'))
    )
    op.add_column('installation', sa.Column('cluster', sa.Text(), nullable=True))
