"""Plain data and contracts that all packages share."""
