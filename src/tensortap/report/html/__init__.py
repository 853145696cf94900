"""Pages for a browser: one file each, which opens from disk without a network. docs/report-data.md describes the data.

assets/      scripts and styles, as they are edited; vendor/ holds third-party code with its licence
bundle.py    joins the assets into what a single page can carry
page.py      the file: policy, static parts, blocks, scripts
assembly.py  joins data, details and static parts into a page
markup.py    escapes text; names from models are never markup
static.py    what the page shows without scripts
definitions.py   the meaning of each number
comparison.py, run.py, times.py   the three pages
data/        what scripts draw from: columns and words as compressed blocks
"""
