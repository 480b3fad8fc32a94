"""The parameters of the flows, as forms of the Prefect UI and as files."""
