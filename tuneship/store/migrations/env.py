"""Alembic's entry: runs the migrations on the connection that `tuneship/store/database.py` hands over."""

from alembic import context

config = context.config
context.configure(
    connection=config.attributes["connection"],
    target_metadata=config.attributes.get("metadata"),
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
