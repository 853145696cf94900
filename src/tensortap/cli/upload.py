"""`tensortap upload`: finish an interrupted upload, or copy a run into an object store."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["upload"]


def upload(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A spool, a folder of spools, or a run.", show_default=False)
    ],
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Where to; a spool knows it.", show_default=False)
    ] = None,
) -> None:
    """Upload a run that is on this disk into an object store.

    A capture to a URL keeps data that it could not upload in its spool, and names this command. Data that is already
    uploaded is not sent again. A spool is removed once it is uploaded completely; a run that was recorded on this disk
    stays.

    Credentials come from the environment, as the driver of the protocol reads them.

    \b
    Example:
      tensortap upload /tmp/tensortap-spool-1000/a-1f2e3d4c-rank_0
      tensortap upload runs/a s3://bucket/runs/a
    """
    from tensortap.cli import screen
    from tensortap.report.wording import clean, nbytes, plural
    from tensortap.store.upload import upload as send

    with screen.waiting(f"uploading {path}"):
        done = send(path, url)
    for each in done:
        typer.echo(clean(f"{plural(len(each.ranks), 'rank')}, {nbytes(each.nbytes)} sent: {each.url}"))
