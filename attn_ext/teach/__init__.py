"""For learning attention: every step with its numbers, a model trained in seconds, its weights as a picture.

| module | what it shows | command |
|---|---|---|
| `walkthrough` | attention by hand in NumPy, then the same numbers from the kernels | `attn-ext walkthrough` |
| `classifier` | why a toy classifier learns nothing, and how it does | `attn-ext train-classifier` |
| `reverse` | an encoder with a decoder that writes words backwards | `attn-ext train-reverse` |
| `heatmap` | which token looks at which, in any model with attention of `attn_ext.nn` | `attn-ext heatmap` |
"""
