"""The commands as `tuneship --help` lists them, by panel: to show them, none of them has to be loaded.

Each sentence is the one that the command itself has; a test compares them.
"""

CONTENTS = {
    "Pipeline": {
        "init": "Write flows, tasks, deployments and examples into a folder; its README.md has the next commands.",
        "release": "Tune a model and release it step by step, as long as its gates allow it.",
        "rollouts": "Recorded rollouts: replay their decisions.",
    },
    "The API": {
        "generate": "Generate with a deployment or through an endpoint; the text is shown while it is generated.",
        "chat": "Talk with a deployment or through an endpoint, a line for each turn; Ctrl-D ends it.",
        "datasets": "Training data.",
        "jobs": "Fine-tuning jobs.",
        "instance-types": "Instance types.",
        "models": "Base models and fine-tuned ones.",
        "deployments": "Models that answer requests.",
        "endpoints": "Addresses that route to one deployment each.",
        "canary": "Addresses that split their traffic over deployments.",
        "evaluations": "Verdicts on the answers of deployments.",
        "releases": "Records that pipelines keep of their releases, and the decisions of people.",
        "webhooks": "Receivers of events.",
        "events": "Events of the last 30 days.",
        "audit": "Who did what in this tenant's name.",
        "api-keys": "API keys, without their secrets.",
        "sign-in-links": "Links that sign a person in to the console.",
        "monitoring": "The numbers that the service counts and measures.",
    },
    "The service's machine": {
        "keys": "API keys: make, list, rotate, revoke.",
        "serve": "Run the service. It prints `ready <url>`; credentials are in <data-dir>/credentials.json.",
        "openapi": "Print the API as an OpenAPI 3.1 document, e.g. to generate a client in another language.",
        "backup": "Write a complete backup into a folder, or bring the one there up to date.",
        "restore": "Put a backup into a new data directory and an empty database; nothing is overwritten.",
        "check": "Compare rows, files, digests and keys, and name what is wrong.",
        "doctor": "Say what this machine can do, and what a model of a given size would need.",
    },
    "Which service": {
        "login": "Store a service's address and a key for later commands, in a file that only you can read.",
        "logout": "Forget the stored login. The key stays valid until it is revoked.",
        "whoami": "Show which service and identity the commands use, and where both are set; exit with 1 if the key "
        "is refused.",
        "console": "Print a link to the console that works once, for ten minutes, with the rights of your key.",
    },
}
