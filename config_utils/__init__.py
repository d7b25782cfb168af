"""From a scale, a method and a learning rate to a complete OLMo-core experiment config."""

import logging

# Said at every import where an optional package of NVIDIA is not installed, before any message of a command.
logging.getLogger("olmo_core.nn.attention.te_attn_api").setLevel(logging.ERROR)
