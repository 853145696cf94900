"""Programs that do not name tensortap: `tensortap run` starts them, finds the trained model, and records it.

- `options.py`: the options of `capture` as text, for the command line, the environment and tensortap.toml
- `settings.py`: the settings of one launch, and how processes inherit them
- `command.py`: the command that runs the program, and its environment
- `site/`: the folder that a started interpreter imports first
- `startup.py`: waits in that process until a framework is imported
- `finder.py`: finds the trained model and its optimizers by observing the program
- `recording.py`: the taps that it opens, and their end
- `series.py`: the runs of one launch, if it trains several models one after another
"""
