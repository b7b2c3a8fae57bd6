"""Attention and KV kernels over paged memory; layouts are described in kernels/README.md.

`reference` is plain torch and defines what is correct. Faster kernels stand beside it and are tested against it;
`cpu` is a whole decoder step in C++.
"""
