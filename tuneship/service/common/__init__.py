"""Parts that several resources use and that know none of them: streams, retries, threads, scaling, shutdown."""
