"""What can be seen of one model, live: its tensors as they flow, what loads and changes them, what they are."""
