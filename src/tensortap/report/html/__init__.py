"""The page for a browser: one file that opens from disk, without any network. docs/report-data.md has the data.

assets/      scripts and styles, as they are edited; vendor/ holds what others wrote, with its licence
bundle.py    joins the assets into what a single page can carry
page.py      the file: policy, static parts, blocks, scripts
markup.py    text into HTML; names from models are never markup
blocks.py    compressed pieces that scripts unpack when they need them
columns.py   long columns of numbers and words as blocks
outline.py   what the rows of any table are: their tree of modules, steps, layers and series
head.py      what both pages say beside their columns
pairs_data.py, run_data.py   what scripts draw from, of a comparison and of a run
static.py    what is there before scripts run, the same on both pages
environment.py, definitions.py   what ran where, and what each number means
"""
