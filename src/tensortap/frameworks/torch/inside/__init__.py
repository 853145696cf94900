"""Taps inside compiled graphs (`compiled="inside"`). Importing this package loads the compiler.

operator.py   the operator that compiled code calls with its tensors, and the gradient's identity function
notes.py      notes on a graph while it is traced: numbers of calls, paths, aliases
hooks.py      hooks on modules, in code that the compiler traces
graphs.py     placing the hooks, and compiling again
compiler.py   changes of the compiler while a tap is open
buffers.py    memory of compiled code, which keeps tapped tensors until they are read
saved.py      the values that a compiled forward saves for backward, chosen as if there were no taps
"""
