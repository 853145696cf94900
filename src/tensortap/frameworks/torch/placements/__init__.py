"""Placements of torch tensors.

dtensors.py     DTensors, and plain tensors that were just taken from one
sharded.py      FSDP1's flat parameters, FSDP2's unsharded ones
surroundings.py Wrappers, meshes and pipeline stages around a model
placer.py       All of them, for one model
"""
