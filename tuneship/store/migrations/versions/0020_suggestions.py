"""What the reading of a dataset suggests, so that it can be shown after a big file was processed"""

from alembic import op
import sqlalchemy as sa

revision = '0020'
down_revision = '0019'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('datasets', sa.Column('suggestions', sa.JSON(none_as_null=True), nullable=True))
