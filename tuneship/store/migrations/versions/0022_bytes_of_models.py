"""The bytes of imported models, which count against their client's quota"""

from alembic import op
import sqlalchemy as sa

revision = '0022'
down_revision = '0021'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('models', sa.Column('imported_bytes', sa.BigInteger(), server_default='0', nullable=False))
