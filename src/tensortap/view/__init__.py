"""The pages of `report` over open runs: parts too large for a file are read when the page requests them.

answers.py   the requests that two runs, or one, can answer, and the answers in bytes
server.py    HTTP for this machine only; knows nothing about runs
"""
