"""Parts that several resources use and that know no resource: streams, retries, limits, shutdown."""
