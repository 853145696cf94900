"""Judge each pair, and find where a divergence begins."""
