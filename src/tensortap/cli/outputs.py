"""Options of `compare` and `replay` for their outputs."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Csv", "ExitZero", "Html", "Json", "Junit", "Markdown", "Parquet", "Quiet", "Verbose"]

Csv = Annotated[str | None, typer.Option(metavar="PATH", help="Write all pairs as CSV; - is stdout.")]
Html = Annotated[str | None, typer.Option(metavar="PATH", help="Write a page for a browser, in one file.")]
Json = Annotated[str | None, typer.Option(metavar="PATH", help="Write everything as JSON; - is stdout.")]
Junit = Annotated[str | None, typer.Option(metavar="PATH", help="Write JUnit XML for CI, one case per module.")]
Markdown = Annotated[str | None, typer.Option(metavar="PATH", help="Write a summary for a ticket or a comment.")]
Parquet = Annotated[str | None, typer.Option(metavar="PATH", help="Write all pairs as Parquet.")]
Verbose = Annotated[
    int,
    typer.Option("-v", "--verbose", count=True, show_default=False, help="100 rows and all notes; -vv all rows."),
]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 even if the runs diverge.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing; only set the exit code.")]
