"""The plugin's logger: below vLLM's own, so that it writes where vLLM does."""

import logging

logger = logging.getLogger("vllm.mambacache")
