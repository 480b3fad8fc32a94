"""The database: connections, writes in order, tables and queries."""
