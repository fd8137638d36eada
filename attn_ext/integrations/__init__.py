"""attn_ext under code that was not written for it.

| what | for |
|---|---|
| `override_sdpa()` | all calls of torch's own attention in this process, in a `with` block, a function or until switched off |
"""

from attn_ext.integrations.sdpa import Calls, override_sdpa

__all__ = ["Calls", "override_sdpa"]
