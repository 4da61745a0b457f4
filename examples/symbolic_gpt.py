"""A GPT whose sizes are symbols, run without a GPU and without its tensors."""

from runtime.models.config import config_with
from runtime.models.families import GPT
from runtime.tracing.symbolic_sizes import symbols
from runtime.tracing.traced_run import run_symbolically, tokens

b, s, h, d, tp = symbols("b s h d tp", (4, 128, 16, 64, 8))
model = GPT(config_with(hidden=h * d, heads=h, tensor_parallel=tp))
logits = run_symbolically(model, tokens(b, s))
print("logits, gathered:", logits)
