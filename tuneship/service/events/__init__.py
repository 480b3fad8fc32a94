"""Handlers of events, webhooks and the audit chain; `tuneship/events/` delivers."""
