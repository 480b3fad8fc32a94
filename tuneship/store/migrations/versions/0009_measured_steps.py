"""The steps of a job at which its model was measured, by number and by loss, found without reading the others"""

from alembic import op
import sqlalchemy as sa

revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None


def upgrade():
    measured = {'sqlite_where': sa.text('evaluated = 1'), 'postgresql_where': sa.text('evaluated')}
    for columns in (['job_id', 'step'], ['job_id', 'validation_loss', 'step']):
        name = op.f(f'ix_job_metrics_{"_".join(columns)}_measured')
        op.create_index(name, 'job_metrics', columns, **measured)
