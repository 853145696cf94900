"""CUDA C++ sources, and the little that is needed to compile and launch them at run time."""
