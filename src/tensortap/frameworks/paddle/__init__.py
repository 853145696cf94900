"""PaddlePaddle behind the contracts of `frameworks.base`."""
