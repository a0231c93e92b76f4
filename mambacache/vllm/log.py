"""Log where vLLM does."""

import logging

logger = logging.getLogger("vllm.mambacache")
