"""CUDA C++ sources of the summary kernel, and the code that compiles and launches them at run time."""
