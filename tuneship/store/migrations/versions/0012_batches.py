"""Batches of requests with their files, and webhooks in OpenAI's form"""

from alembic import op
import sqlalchemy as sa

revision = '0012'
down_revision = '0011'
branch_labels = None
depends_on = None


def upgrade():
    op.create_table('batches',
    *resource(),
    sa.Column('endpoint', sa.Text(), nullable=False),
    sa.Column('input_file_id', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('caller', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('security_settings', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('total', sa.BigInteger(), nullable=False),
    sa.Column('completed', sa.BigInteger(), nullable=False),
    sa.Column('failed', sa.BigInteger(), nullable=False),
    sa.Column('prompt_tokens', sa.BigInteger(), nullable=False),
    sa.Column('completion_tokens', sa.BigInteger(), nullable=False),
    sa.Column('model', sa.Text(), nullable=True),
    sa.Column('errors', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('output_file_id', sa.Text(), nullable=True),
    sa.Column('error_file_id', sa.Text(), nullable=True),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('in_progress_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('finalizing_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('completed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('failed_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('expired_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('cancelling_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('cancelled_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_batches'))
    )
    op.create_index('ix_batches_client_id_created_at_id', 'batches', ['client_id', 'created_at', 'id'])
    op.create_index('ix_batches_status', 'batches', ['status'])
    op.create_table('batch_files',
    *resource(),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('purpose', sa.Text(), nullable=False),
    sa.Column('batch_id', sa.Text(), nullable=True),
    sa.Column('position', sa.BigInteger(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.Column('came_safely', sa.Boolean(), nullable=False),
    sa.Column('security_settings', sa.JSON(none_as_null=True), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_batch_files'))
    )
    op.create_index('ix_batch_files_client_id_created_at_id', 'batch_files', ['client_id', 'created_at', 'id'])
    op.add_column('webhooks', sa.Column('profile', sa.Text(), nullable=False, server_default='tuneship'))
    op.create_index('ix_batch_files_batch_id_position', 'batch_files', ['batch_id', 'position'])


def resource():
    return (
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('client_id', sa.Text(), nullable=False),
        sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    )
