"""Hooks, and the calls and gradients that they observe.

watcher.py           the calls of modules, over gradient_watcher.py: gradients, parameters and buffers
planned_watcher.py   steps that repeat the one before; follower.py compares them with it, event by event
destination.py       where tensors and events go
module_hooks.py      the hooks on modules; hook_guard.py surrounds each
clock.py             counts steps, micro steps and calls, and finds the call that a recomputation repeats
modes.py             training, evaluation, traces; uncounted_steps.py notices loops whose steps are not counted
flatten.py           tensors and plain values of arguments and outputs; templates.py knows their structure
                     from the call before, and swap.py replaces tensors in them
inside.py            calls inside compiled graphs
operators.py         operators of chosen modules
gradients/           gradients of inputs, without touching the graph
"""
