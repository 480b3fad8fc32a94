"""Who may do what: API keys, data keys, HIPAA mode, isolation of workers, the audit trail."""
