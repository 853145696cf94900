"""Judge each pair, and find where a divergence begins.

structure.py    calls and sources of the records, over record_columns.py; steps/ works out one step at a time
rules/          all tolerances
judging.py      the judge, pair by pair, from the numbers in pairs.py; steps/judging.py judges whole steps.
                few_elements.py, moved_tokens.py, ties.py, worst_outputs.py and wrong_so_far.py know what it asks;
                operators.py judges what is below the modules
judgement.py    what it yields
findings.py     from births to findings: attribution.py names the module, causes.py the cause, first_operator.py the
                operator inside

Gradients that one side alone has:
missing_gradients.py, extra_gradients.py    the findings; extra_shares.py those of parameters with a further use
missing_rows.py      the rows that should be there; counterparts.py, shared_values.py and loss_terms.py tell which
gradient_ends.py     the module at which a gradient ends; newly_detached.py and detached.py values outside the graph

A check on the reference's own inputs:
isolated.py          the findings, from checked_pairs.py and isolation.py, which tells how the run went
isolated_attribution.py, consequences.py    the module to blame; records that follow from others
differentiated.py, random_draws.py          gradients and random numbers that a check does not judge

What makes a difference harmless, or leaves the answer open:
lost_masks.py, masked_calls.py, read_hidden.py, unread.py, shown_elements.py, extremes.py    masks
judged_elsewhere.py, other_backwards.py, overflow.py, recomputations.py, unpassed.py         all else,
and unseen_makers.py

precision.py judges both sides by a truth, with free_precision.py and implementations.py.
row_lists.py and gradient_makers.py have lists of rows as columns.
"""
