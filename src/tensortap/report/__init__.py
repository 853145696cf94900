"""The last phase: what people and programs see. One file an output; nothing here opens a run or knows of argv.

    facts.py                RunFacts, the plain data about a run that the pages start from
    run_page.py             a run on the terminal: its facts, its coverage, its records
    run_json.py             the same as one JSON object
    comparison_page.py      a comparison on the terminal: one screen, or more if asked
    comparison_json.py      all of a comparison as one JSON object, in a documented schema
    comparison_csv.py       its pairs as CSV; comparison_parquet.py the same as Parquet
    comparison_junit.py     one case a module, for CI
    comparison_markdown.py  a page for a step's summary or a comment
    comparison_html.py      a page for a browser, in one file; run_html.py the same of one run; html/ holds their parts
    assertion.py            a divergence in the words of an assertion
    pairs.py, findings.py, unmatched.py   which rows to show, and their words, the same in every output
    output.py               files that are there whole or not at all, or stdout
    table.py                aligned columns that fit a given width
    wording.py              numbers, sizes, shapes and names as people read them

A reporter builds plain data first and renders it second, so that tests can ask the data.
"""
