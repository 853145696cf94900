"""Tensors become records: read, summarised and stored once, however often they are seen.

recorder.py           decides how each tensor is read, and writes its record; over device_recorder.py, for those on
                      a device
slots.py              identities that repeat from step to step; unique_keys.py tells repeated ones apart
host_rows.py          tensors in host memory that are copied or read now, and summarised later
seen_tensors.py       those that are summarised at once
repeated_columns.py   columns of the index that repeat from step to step
deferred/             reads on a device that may wait
"""
