"""Write a run to disk while it goes on."""
