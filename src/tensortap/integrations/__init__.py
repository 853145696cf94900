"""Callbacks for trainers. Each module needs its own trainer library, and nothing else imports it.

- `transformers.py`: `TapCallback` for the Trainer of transformers and of PaddleNLP
- `lightning.py`: `TapCallback` for Lightning
- `accelerate.py`: `capture` for the objects that an Accelerator has prepared
- `paddle.py`: `TapCallback` for `paddle.Model.fit`
- `fits.py`: the taps of one callback, one for each fit
"""
