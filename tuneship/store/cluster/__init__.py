"""Rows that members of a cluster share: leases, sessions, demand, news."""
