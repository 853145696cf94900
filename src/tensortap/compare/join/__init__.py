"""Join the records of several ranks to records of whole tensors, before two runs are aligned.

geometry.py     boxes in a whole: do they cover it once?
pieces.py       the rows of all ranks as columns, with their identities and placements
layout.py       the layout of each identity: shards, replicas and partial sums; replicas vote by digest
micro.py        micro batches as one more axis
accumulated.py  gradients of micro batches that one side shows only as a sum
source.py       a run of whole tensors over a run of many ranks
bands.py        the bytes of a whole tensor, a range of positions at a time
resolve.py      what only the other side can decide: tied votes, records without a placement
scaling.py      a constant factor over all gradients
shares.py       gradients whose shares were rounded before they were added
hypotheses.py   the causes that only parallel layouts have
findings.py     replicas, gaps and overlaps as findings
differing.py    the ranks that differ where a joined record is wrong
evidence.py     all of this, as a verdict needs it
joining.py      both sides of a comparison, joined

merging.py has the arithmetic of summaries, execution.py one order for all ranks, members.py what each position of an
axis holds, order.py permutations, norms.py what is not known of sums, beside.py facts beside tensors.
"""
