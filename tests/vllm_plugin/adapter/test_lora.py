"""What sleep mode holds of LoRA's buffers, which only a GPU tells."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
from sleeping_engine import start
from vllm.device_allocator.cumem import CuMemAllocator

def main():
    llm = start(sys.argv[1], {}, enable_lora=True, max_loras=1, max_lora_rank=int(sys.argv[2]))
    model = llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    layers = [module for module in model.modules() if hasattr(module, "qerl_a")]
    pool = CuMemAllocator.get_instance().pointer_to_data.values()
    seen = {
        "lora": sum(layer.qerl_a.nbytes + layer.qerl_b.nbytes for layer in layers),
        "pool": sum(data.handle[1] for data in pool if data.tag == "weights"),
    }
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    main()
"""


def test_a_sleeping_engine_keeps_no_buffers_beside_those_in_use(random_qwen2, run_script):
    small, large = (run_script(SCRIPT, str(random_qwen2), str(rank)) for rank in (8, 512))
    more = large["lora"] - small["lora"]
    assert more > 2**24
    assert large["pool"] - small["pool"] < more / 4, (small, large)
