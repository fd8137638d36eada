"""attn_ext under code that was not written for it.

`override_sdpa()` serves every attention call of torch in this process: in a `with` block, while a function runs, or
until it is switched off.
"""

from attn_ext.integrations.sdpa import Calls, override_sdpa

__all__ = ["Calls", "override_sdpa"]
