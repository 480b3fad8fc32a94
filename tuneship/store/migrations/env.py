"""Alembic's entry: runs the migrations in the transaction that `tuneship/store/database/database.py` hands over."""

from alembic import context

config = context.config
context.configure(
    connection=config.attributes["connection"],
    target_metadata=config.attributes.get("metadata"),
)
with context.begin_transaction():
    context.run_migrations()
