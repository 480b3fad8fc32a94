"""What the members of a cluster have taken of each window of requests"""

from alembic import op
import sqlalchemy as sa

revision = '0014'
down_revision = '0013'
branch_labels = None
depends_on = None


def upgrade():
    is_postgres = op.get_bind().dialect.name == 'postgresql'
    op.create_table('rate_windows',
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('ends', sa.BigInteger(), nullable=False),
    sa.Column('taken', sa.BigInteger(), nullable=False),
    sa.Column('chunk', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('client_id', 'kind', 'ends', name=op.f('pk_rate_windows')),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
