"""The identity of an installation, the check value of its master key, and the newest time that it has seen"""

import secrets

from alembic import op
import sqlalchemy as sa

revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None


def upgrade():
    table = op.create_table('installation',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('starts', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('key_check', sa.LargeBinary(), nullable=True),
    sa.Column('newest_time', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_installation'))
    )
    op.bulk_insert(table, [{'id': secrets.token_hex(16)}])
