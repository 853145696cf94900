"""The last phase: outputs for people and programs. Nothing here opens a run or reads argv.

    facts.py                RunFacts, the plain data about a run that its pages start from
    pairs.py, findings.py, unmatched.py   which rows to show, and their text, the same in every output
    wording.py              numbers, sizes, shapes and names as people read them
    plain.py                values as JSON can hold them
    notebook.py             fragments that notebooks show of results
    terminal/               pages for a terminal; console.py prints them
    files/                  one file for each format; output.py opens them, saving.py selects one by suffix
    html/                   pages for a browser, each in one file

A reporter builds plain data first and renders it second, so that tests can check the data.
"""
