"""Two questions about one document over the API of vLLM with the plugin: the second hits what the first computed.

vllm serve MODEL --enable-prompt-tokens-details
python examples/vllm_client.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
document = "Ada went to Oslo . Max went to Rome . Ada went to Lima . " * 20
for name in ("Ada", "Max", "Ada"):
    answer = client.completions.create(model=model, prompt=f"{document}where is {name} ?", max_tokens=2, temperature=0)
    details = answer.usage.prompt_tokens_details
    hit = details.cached_tokens if details else 0
    print(f"{answer.choices[0].text}  ({hit} of {answer.usage.prompt_tokens} tokens hit)")
