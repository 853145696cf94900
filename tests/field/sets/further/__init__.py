"""Families for right pairs alone: nobody plants mistakes into them."""
