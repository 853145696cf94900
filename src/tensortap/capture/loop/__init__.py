"""Loop facts: what the training loop does beside tensors, each written where it changes.

book.py            LoopBook: reads the facts of each recorded step, and writes those that changed
attributes.py      plain attributes of modules
detached.py        DetachedValues: inputs and outputs that autograd does not reach
optimizers.py      Optimizers: counts steps, reads settings, and passes on the gradients that a step uses
recomputed.py      Recomputations: whether a recomputation makes the values of the first forward
random_states.py   digests of the states of random generators
ties.py            parameters and buffers that are one tensor
"""
