"""HDF5 files of tensors."""
