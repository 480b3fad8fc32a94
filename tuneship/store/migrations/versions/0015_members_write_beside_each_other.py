"""Members write beside each other: audit rows before their chain, and a shard of the metrics for each"""

from alembic import op
import sqlalchemy as sa

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None

KEY = ['deployment_id', 'endpoint_id', 'width', 'start', 'shard']


def upgrade():
    op.create_table('unlinked_audit',
    sa.Column('position', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('key_id', sa.Text(), nullable=False),
    sa.Column('action', sa.Text(), nullable=False),
    sa.Column('resource_id', sa.Text(), nullable=True),
    sa.Column('status', sa.Integer(), nullable=False),
    sa.Column('address', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=True),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=True),
    sa.Column('mac', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('position', name=op.f('pk_unlinked_audit'))
    )
    if op.get_bind().dialect.name == 'postgresql':
        op.add_column('metric_windows', sa.Column('shard', sa.BigInteger(), nullable=False, server_default='0'))
        # The key's name is that of whichever migration has made the table.
        keys = sa.inspect(op.get_bind()).get_pk_constraint('metric_windows')
        op.drop_constraint(keys['name'], 'metric_windows', type_='primary')
        op.create_primary_key('pk_metric_windows', 'metric_windows', KEY)
    else:
        _rebuild()
    op.create_index(
        'ix_metric_windows_shards',
        'metric_windows',
        ['width', 'start'],
        sqlite_where=sa.text('shard <> 0'),
        postgresql_where=sa.text('shard <> 0'),
    )


def _rebuild():
    """Copy the rows into a table with the longer key, which SQLite cannot give to the old one."""
    op.drop_index('ix_metric_windows_width_start', 'metric_windows')
    op.rename_table('metric_windows', 'metric_windows_without_shards')
    op.create_table('metric_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('width', sa.BigInteger(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('shard', sa.BigInteger(), nullable=False, server_default='0'),
    sa.Column('window', sa.LargeBinary(), nullable=False),
    sa.Column('minutes', sa.LargeBinary(), nullable=True),
    sa.PrimaryKeyConstraint(*KEY, name=op.f('pk_metric_windows')),
    sqlite_with_rowid=False,
    )
    op.execute(
        'INSERT INTO metric_windows (deployment_id, endpoint_id, width, start, shard, "window", minutes) '
        'SELECT deployment_id, endpoint_id, width, start, 0, "window", minutes FROM metric_windows_without_shards '
        'ORDER BY deployment_id, endpoint_id, width, start'
    )
    op.drop_table('metric_windows_without_shards')
    op.create_index('ix_metric_windows_width_start', 'metric_windows', ['width', 'start'])
