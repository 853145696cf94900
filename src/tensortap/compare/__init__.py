"""The third phase: align two runs, measure how far each pair is apart, judge, and name the first place they part."""
