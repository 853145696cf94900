"""What families and mistakes are made of: builders and batches, changes of a training, and the training itself."""
