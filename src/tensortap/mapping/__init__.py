"""Maps one model to another of the same architecture under other names and in other tensor layouts.

The input is two outlines, plain descriptions of module trees, and rules. `compare` makes outlines of runs,
`model.transfer` of live models. The source model is described in terms of the target: in a comparison the candidate is
the source and the reference the target.

outline.py         ModelOutline: the modules and tensors of one model
rules.py           Rules as data; rules_file.py reads them from torch_paddle.toml or a user's file
class_rules.py     the rule for the classes of two modules, also for packed projections
module_matches.py  pairs of corresponding modules, over similarity.py
tensor_matches.py  pairs of corresponding parameters, each with its LayoutConversion (layouts.py)
value_matches.py   pairs of corresponding inputs and outputs
model_mapping.py   ModelMapping: all of these together
"""
