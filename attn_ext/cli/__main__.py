"""`python -m attn_ext.cli` is `attn-ext`."""

from . import main

main()
