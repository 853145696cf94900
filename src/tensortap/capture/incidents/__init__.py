"""Incidents, to which a tap that is left on reacts: a NaN is born, the loss jumps, an exception ends the block.

incidents.py   the reactions
alarm.py       checks every summary; spikes.py recognises a spike of the loss
ring.py        the last steps, whose tensors are held for now
"""
