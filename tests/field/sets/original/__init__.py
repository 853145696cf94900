"""The first families, on which most rules were tuned, and a held out part of them."""
