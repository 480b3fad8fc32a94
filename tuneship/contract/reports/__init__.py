"""Reports about jobs and deployments: metrics by step, log entries."""
