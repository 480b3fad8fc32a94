"""Tuned models that were trained elsewhere have no job"""

from alembic import op

revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None


def upgrade():
    with op.batch_alter_table('models') as models:
        models.alter_column('job_id', nullable=True)
