"""A model and a step of a few tokens, whose plan can be computed by hand."""

from vlm_grpo.planning.sizes import LayerBytes, ModelShape, TextShape, VisionShape, Workload

SHAPE = ModelShape(
    name="small",
    # Weights of a layer: 64 of queries, 32 of keys, 32 of values, 64 of outputs, 3 × 128.
    text=TextShape(2, 8, 16, 16, 2, 1, 8, 4, 100, False),
    # Weights of a block: 4 × 16 and 2 × 24.
    vision=VisionShape(3, 4, 6, 1, False, "gelu", None, 3, 5, 4),
    num_weights=3000,
    num_trained=2900,
    num_linear=2500,
    num_adapted=1500,
    shares_prompts=True,
    lora_rank=0,
    trains_vision=True,
    head_frozen=False,
    precision="bfloat16",
    state_bytes={"adamw": 11_600},
    layer=LayerBytes(10, 100, 6, 60, 2, 1, 3),
    block=LayerBytes(7, 50, 3, 20, 1),
)
WORK = Workload(
    num_prompts=2,
    num_generations=3,
    prompt_tokens=20,
    patches=16,
    image_tokens=4,
    completion_tokens=5,
    rollout_budget=1 << 20,
    update_budget=1 << 20,
    head_chunk_tokens=4,
    image_pixels=7,
)
"""One micro-batch: 2 prompts of 20 tokens, and 6 completions of which 4 tokens are inputs."""
