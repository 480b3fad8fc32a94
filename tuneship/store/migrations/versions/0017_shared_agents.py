"""The agents that the members of a cluster share, the demand at each member, and the replicas that a leader wants"""

from alembic import op
import sqlalchemy as sa

revision = '0017'
down_revision = '0016'
branch_labels = None
depends_on = None


def upgrade():
    is_postgres = op.get_bind().dialect.name == 'postgresql'
    op.create_table('agents',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('base', sa.Text(), nullable=False),
    sa.Column('digest', sa.Text(), nullable=False),
    sa.Column('number', sa.BigInteger(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('host', sa.Text(), nullable=True),
    sa.Column('port', sa.BigInteger(), nullable=True),
    sa.Column('certificate', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_agents'))
    )
    op.create_table('member_demands',
    sa.Column('member', sa.Text(), nullable=False),
    sa.Column('written_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('lapses_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('demand', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('member', name=op.f('pk_member_demands')),
    prefixes=['UNLOGGED'] if is_postgres else [],
    )
    op.add_column('deployments', sa.Column('wanted_replicas', sa.BigInteger(), nullable=True))
    op.add_column('deployments', sa.Column('is_forced', sa.Boolean(), server_default=sa.false(), nullable=False))
