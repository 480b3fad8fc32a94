"""The tools with which the resources are declared: operations, verbs, pages, scopes, examples."""
