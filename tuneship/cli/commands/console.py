"""`tuneship console`: a link that signs a person in to the console of the service, once."""

import os
import sys
import webbrowser
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tuneship.cli.connection import connected, reported
from tuneship.cli.output import note

app = typer.Typer(no_args_is_help=True)


@app.command()
def console(
    opens: Annotated[
        bool, typer.Option("--open", help="Open it in the browser of this machine.")
    ] = False,
) -> None:
    """Print a link to the console that works once, for ten minutes, with the rights of your key."""
    with reported(), connected() as client:
        link = client.sign_in_links.create()
        sys.stdout.write(f"{link.url}\n")
        place = urlsplit(link.url)
        # The service's machine is at the other end of the connection, and the browser at this one.
        if os.environ.get("SSH_CONNECTION") and place.port:  # noqa: TID251 - the shell's variables are no settings
            note(f"from your own machine: ssh -L {place.port}:127.0.0.1:{place.port} ...")
        if opens and not webbrowser.open(link.url):
            note("no browser could be opened")
