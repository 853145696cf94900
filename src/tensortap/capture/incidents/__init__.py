"""What a tap that is left on reacts to: a NaN is born, the loss jumps, an exception ends the block.

incidents.py   what happens then
alarm.py       looks at every summary; spikes.py recognises a spike of the loss
ring.py        the last steps, whose tensors are held for now
"""
