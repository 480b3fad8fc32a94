"""Rows, migrations, blobs, leases. Knows no HTTP."""
