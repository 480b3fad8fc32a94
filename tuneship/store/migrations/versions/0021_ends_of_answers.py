"""Whether a model has learnt where its answers end, the text that was put there, and the GPUs of a job"""

from alembic import op
import sqlalchemy as sa

revision = '0021'
down_revision = '0020'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('jobs', sa.Column('ends_learnt', sa.Float(), nullable=True))
    op.add_column('jobs', sa.Column('devices', sa.JSON(none_as_null=True), nullable=True))
    op.add_column('models', sa.Column('ends_learnt', sa.Float(), nullable=True))
    op.add_column('models', sa.Column('appended_end', sa.Text(), nullable=True))
