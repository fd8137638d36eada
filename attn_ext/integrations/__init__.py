"""attn_ext under code that was not written for it.

`override_sdpa()` serves every attention call of torch in this process: in a `with` block, while a function runs, or
until it is switched off. `attn_ext.integrations.transformers` (extra `hf`) is a module of its own, for it needs the
library it is named after.
"""

from attn_ext.integrations.sdpa import Calls, override_sdpa

__all__ = ["Calls", "override_sdpa"]
