"""The last phase: what people and programs see. One file an output; nothing here opens a run or knows of argv.

    facts.py      RunFacts, the plain data about a run that the pages start from
    run_page.py   a run on the terminal: its facts, its coverage, its records
    run_json.py   the same as one JSON object
    table.py      aligned columns that fit a given width
    wording.py    numbers, sizes, shapes and names as people read them

A reporter builds plain data first and renders it second, so that tests can ask the data.
"""
