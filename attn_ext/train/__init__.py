"""Training on real text: a small language model on bytes, alone or in several processes.

| module | what it is for |
|---|---|
| `corpus` | text as bytes, cut into what is learned from and what is held out |
| `recipe` | the sizes of the model and how it is trained; the learning rate over a run |
| `language_model` | the training loop: steps, stopping, going on later with the same curve |
| `checkpoint` | a run in one file that is whole at any moment |
| `processes` | what the processes of `torchrun` say to one another |
| `scoring` | bits per byte of a held-out text, and what gzip and xz make of it |

The command is `attn-ext train-lm`; nothing here prints.
"""

from __future__ import annotations

from .checkpoint import Checkpoint, CheckpointError
from .corpus import DOCUMENTATION, Corpus, python_documentation, read_corpus, split_text
from .language_model import Training, TrainingDiverged, TrainingStep, memory_needed
from .processes import Processes, training_processes
from .recipe import Recipe
from .scoring import bits_per_byte, compressed_sizes

__all__ = [
    "DOCUMENTATION",
    "Checkpoint",
    "CheckpointError",
    "Corpus",
    "Processes",
    "Recipe",
    "Training",
    "TrainingDiverged",
    "TrainingStep",
    "bits_per_byte",
    "compressed_sizes",
    "memory_needed",
    "python_documentation",
    "read_corpus",
    "split_text",
    "training_processes",
]
