"""Build a model on the meta device, swap its modules, and generate.

python examples/quickstart.py
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ktinject

path = Path(__file__).parent / "models" / "tiny-deepseek-v3"

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
ktinject.optimize(model, "deepseek-v3", checkpoint=path)  # in place
print(model.ktinject)

tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("def read_lines(path):\n    with open(path) as f:\n", return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=32)
print(tokenizer.decode(output[0]))
