"""An extension of vLLM's worker on a CPU, which vLLM imports in its own environment.

vLLM 0.32 computes linear layers on a CPU with a packed copy of their weights. When weights are
loaded again, it packs them again, except those of an output head that is tied to the embeddings.
"""

import importlib
from typing import Any

_LAYERS = "vllm.model_executor.layers"


class WorkerExtension:
    """Methods that ``collective_rpc`` can call."""

    model_runner: Any

    def pack_tied_weights(self) -> None:
        """Pack the weights of embeddings and of an output head again."""
        # Imported late: vLLM reads this file while it starts.
        linear = importlib.import_module(f"{_LAYERS}.utils")
        embeddings = importlib.import_module(f"{_LAYERS}.vocab_parallel_embedding")
        for module in self.model_runner.get_model().modules():
            is_embedding = isinstance(module, embeddings.VocabParallelEmbedding)
            if is_embedding and hasattr(module, "cpu_linear"):
                linear.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
