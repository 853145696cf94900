"""Placements: the positions of a record's elements in the whole, in runs of several processes.

layout.py         the user's layout: a TOML file or a mapping
parallel.py       what a process knows about its part of a model
placer.py         the placement of a record, from the layout, the framework, or a guess
slot_placer.py    placements that hold from step to step
global_names.py   names of modules in the whole model
"""
