"""Kernels in Triton for NVIDIA GPUs; layouts: kernels/README.md. Import from the modules; this one imports nothing.

    attention     a mixed batch: decode and extend together (decode_plan, tree_decode, extend)
    rope_write    norm, rotation and KV write
    rows          residual add with RMSNorm, SwiGLU
    sample        tokens and logprobs from logits
    copy_pages    whole pages, all layers
    configs       the tiles of every supported configuration
    production    compiles them all for sm_90 (compile)

Without a GPU they run only in Triton's interpreter (TRITON_INTERPRET=1), which is an oracle for tests, not a path.
"""
