"""Where `compare` and `replay` put what they found, and how much of it they print."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Csv", "ExitZero", "Html", "Json", "Junit", "Markdown", "Parquet", "Quiet", "Verbose"]

Csv = Annotated[str | None, typer.Option(metavar="PATH", help="All pairs as CSV; - is stdout.")]
Html = Annotated[str | None, typer.Option(metavar="PATH", help="A page to look at, in one file.")]
Json = Annotated[str | None, typer.Option(metavar="PATH", help="Everything as JSON; - is stdout.")]
Junit = Annotated[str | None, typer.Option(metavar="PATH", help="One case a module, for CI.")]
Markdown = Annotated[str | None, typer.Option(metavar="PATH", help="A page for a ticket or a comment.")]
Parquet = Annotated[str | None, typer.Option(metavar="PATH", help="All pairs as Parquet.")]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, show_default=False, help="100 rows and all else; -vv all rows.")
]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="End with 0 even if the runs diverge.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing; the exit code says it.")]
