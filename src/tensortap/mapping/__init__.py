"""The same architecture under other names and in other layouts: rules as data, and alignment by structure.

Works on outlines, plain descriptions of two trees of modules, and knows neither frameworks nor runs: `compare` makes
outlines of runs, `model.transfer` of live models.
"""
