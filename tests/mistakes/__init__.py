"""Mistakes that really happen, planted in small models one at a time; and harmless changes that must not alarm."""
