"""C++ kernels for the CPU (module ``_native``) and the backend made of them."""
