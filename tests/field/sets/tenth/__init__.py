"""The tenth blind trial: families and mistakes that were run once before any rule was changed for them."""
