"""The report's page over runs that are open: what is too large for a file is read when somebody asks for it.

answers.py   what can be asked of two runs, or of one, and the answer in bytes
server.py    HTTP for this machine only; knows nothing of runs
"""
