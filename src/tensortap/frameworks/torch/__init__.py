"""PyTorch behind the contracts of `frameworks.base`."""
