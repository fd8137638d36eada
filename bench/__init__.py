"""Benchmarks of attn_ext: one script a question, named after it; `python -m bench --help` lists them."""
