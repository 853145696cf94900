"""Plain data and contracts that every room shares."""
