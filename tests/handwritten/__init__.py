"""Small models that people write by hand, right and wrong: what a verdict says about code that follows no library."""
