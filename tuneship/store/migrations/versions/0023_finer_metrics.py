"""Finer counts beside metric windows, the salt and large keys of a split, and the ages of members' requests"""

from alembic import op
import sqlalchemy as sa

revision = '0023'
down_revision = '0022'
branch_labels = None
depends_on = None


def upgrade():
    is_postgres = op.get_bind().dialect.name == 'postgresql'
    op.create_table('finer_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('width', sa.BigInteger(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('shard', sa.BigInteger(), nullable=False),
    sa.Column('counts', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('deployment_id', 'endpoint_id', 'width', 'start', 'shard', name=op.f('pk_finer_windows')),
    sqlite_with_rowid=False,
    )
    op.add_column('endpoints', sa.Column('rollout_id', sa.Text(), nullable=True))
    op.add_column('endpoints', sa.Column('large_keys', sa.Text(), nullable=True))
    op.create_table('member_ages',
    sa.Column('member', sa.Text(), nullable=False),
    sa.Column('written_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('ages', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('member', name=op.f('pk_member_ages')),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
