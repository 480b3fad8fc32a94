"""The losses of the validation rows of a job, and whether it was asked for them"""

from alembic import op
import sqlalchemy as sa

revision = '0024'
down_revision = '0023'
branch_labels = None
depends_on = None


def upgrade():
    op.add_column('jobs', sa.Column('comparison', sa.JSON(none_as_null=True), nullable=True))
    op.create_table(
        'job_row_losses',
        sa.Column('job_id', sa.Text(), nullable=False),
        sa.Column('losses', sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint('job_id', name=op.f('pk_job_row_losses')),
    )
