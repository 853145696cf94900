"""The modules of a tapped model and their tensors, as they are and as they change.

tree.py            modules by structural name: without wrappers, shared ones once
models.py          several models in one tap
own_tensors.py     parameters and buffers, and the hooks on gradients of parameters
model_changes.py   modules that are added, replaced, removed or compiled meanwhile
unchanged.py       whether a model is as it was in the step before
mode_remarks.py    remarks that depend on the mode of a module
"""
