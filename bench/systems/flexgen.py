"""FlexGen's own package through its Python API, CUDA only. If the weights fit, everything is on the GPU, without
overlap; otherwise the placement is the paper's (arXiv 2303.06865) for OPT-30B on a GPU of 16 GB.

Options: "cpu_attention" (default true where weights are offloaded).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from bench.common import random_prompts
from bench.job import Job

PACKAGE = "flexgen"

#: FlexGen's names of the numbers of `--percent`
SHARES = [f"{data}_{device}_percent" for data in ("w", "cache", "act") for device in ("gpu", "cpu")]


def run(job: Job) -> dict:
    import numpy as np
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    sizes = json.loads((Path(job.model) / "config.json").read_text())
    config = OptConfig(
        name="checkpoint",
        max_seq_len=sizes["max_position_embeddings"],
        num_hidden_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        n_head=sizes["num_attention_heads"],
        input_dim=sizes["hidden_size"],
        ffn_embed_dim=sizes["ffn_dim"],
        vocab_size=sizes["vocab_size"],
        dtype=np.float16,
    )
    on_gpu = job.checkpoint_bytes < 0.85 * (job.gpu_bytes or math.inf)
    percent = (100, 0, 100, 0, 100, 0) if on_gpu else (20, 80, 0, 100, 0, 100)
    size = math.gcd(job.batch, 32)  # the paper's 48 does not divide the published batches
    no_compression = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    policy = Policy(
        gpu_batch_size=size,
        num_gpu_batches=job.batch // size,
        **dict(zip(SHARES, percent)),
        overlap=not on_gpu,
        sep_layer=True,
        pin_weight=True,
        cpu_cache_compute=not on_gpu and job.options.get("cpu_attention", True),
        attn_sparsity=1.0,
        compress_weight=False,
        comp_weight_config=no_compression,
        compress_cache=False,
        comp_cache_config=no_compression,
    )
    env = ExecutionEnv.create(str(Path(job.scratch) / "flexgen"))
    try:
        model = OptLM(config, env, str(numpy_weights(Path(job.model), Path(job.scratch))), policy)
        prompts = random_prompts(job.batch, job.prompt_len)
        model.generate([p[:32] for p in prompts], max_new_tokens=1)
        timers("generate").reset()
        out = model.generate(prompts, max_new_tokens=job.gen_len)
        assert out.shape == (job.batch, job.prompt_len + job.gen_len)
        prefill, *steps = timers("generate").costs
    finally:
        env.close_copy_threads()
    assert len(steps) == job.gen_len - 1
    return {"prefill": prefill, "decode": sum(steps), "lowest_tier": "GPU" if on_gpu else "RAM"}


def numpy_weights(model: Path, scratch: Path) -> Path:
    """A copy of a checkpoint as FlexGen reads it: one .npy file per parameter, without the suffix."""
    import numpy as np
    from safetensors import safe_open

    folder = scratch / "numpy" / "checkpoint-np"
    folder.mkdir(parents=True)
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "np") as tensors:
            for name in tensors.keys():
                short = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                with open(folder / short, "wb") as file:
                    np.save(file, tensors.get_tensor(name))
    return folder.parent
