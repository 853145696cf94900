"""Tolerance rules: how much difference each pair is allowed, and why.

table.py       all rules, in order: name, condition (conditions.py) and amount of each
names.py       the names of rules that the judge and the reports ask for
tolerance.py   applies the rules, to one pair or to many in columns
amounts.py     the amounts for one pair; optimizer_amounts.py has those for an optimizer's step
columns.py     the amounts for many pairs at once, with optimizer_columns.py and summed_columns.py
evidence.py    what a rule can ask about a pair, with optimizer_gradients.py and summed_gradients.py
rounding.py    constants of dtypes, rows and measured noise; margins.py has the limits that amounts and columns share
conditioning.py, unseen.py   rules that are asked only of pairs that no rule of the table allows
doubts.py      why a pair beyond its tolerance may still be right
by_design.py   differences between frameworks, which raise the rounding that a pair starts from

Some rules assume an error that nothing measured: the rounding of a dtype, or how errors add up. Such a rule allows at
most `MOST_ASSUMED`, unless the pair is a sum that cancels out. A sum cancels out if it is smaller than its terms are
together, even if their signs were random.
"""
