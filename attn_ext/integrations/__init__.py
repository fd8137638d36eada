"""attn_ext inside other libraries, a module each. Nothing is imported here: each needs the library it is named after.

import attn_ext.integrations.transformers        # pip install 'attn_ext[hf]'
"""
