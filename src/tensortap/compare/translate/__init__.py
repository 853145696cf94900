"""Express the candidate in the reference's names and layouts."""
