"""Families that have what the original ones lack, and a held out part of them."""
