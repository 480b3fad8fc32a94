"""The newest checkpoint of a job, where it is in the store of files"""

from alembic import op
import sqlalchemy as sa

revision = '0016'
down_revision = '0015'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('jobs', sa.Column('checkpoint', sa.JSON(none_as_null=True), nullable=True))
