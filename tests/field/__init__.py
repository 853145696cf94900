"""Mistakes in models as people train them, and right pairs of the same models.

`kit` has what families and mistakes are made of; `sets` has the families and their mistakes, by the occasion on which
they were written; `bench` runs pairs and says whether the verdict was right. `zoo` has all mistakes. The tests run a
part of it, and `benchmarks/field.py` all.
"""
