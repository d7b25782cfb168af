import os

import torch

# Triton decides at import whether it interprets: before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
