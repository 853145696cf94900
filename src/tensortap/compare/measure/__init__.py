"""Measure how far apart each pair is.

measures.py     the difference of each pair: by digest, from all elements, or from sketches
tensors.py      whole tensors, by engine.py with engines/, or device.py
edges.py        elements at the edge of their dtype's range
noise.py        measured noise; step_noise.py, movement.py and truth.py other distances that tolerances depend on
kinks.py, gelu.py    elements of activations that explain a difference
choices.py      choices of experts, with routed.py, selections.py and token_order.py

Masks, and positions that they hide:
mask_measures.py     measures the pairs that mask_pairs.py finds: masks.py from elements, mask_sketches.py from sketches
mask_conventions.py  how a mask says what it hides
hidden.py            positions of which attention makes anything, with padding.py, visible.py, ranges.py and sums.py
"""
