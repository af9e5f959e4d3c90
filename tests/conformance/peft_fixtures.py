"""Logits of an adapter that kvsieve trained, by peft and transformers: tests/fixtures/adapter/.

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
    kvsieve train --method lora --model models/builtin --text README.md --length 64 --batch 2 --steps 20 --learning-rate 5e-3 \
        --target all-linear --rank 4 --out adapter
    python tests/conformance/peft_fixtures.py adapter

The adapter's two files are copied beside what peft makes of them, with a base that is found from the project's folder.
"""

import json
import pathlib
import shutil
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parents[2]
TO = ROOT / "tests/fixtures/adapter"


def main():
    trained = pathlib.Path(sys.argv[1])
    TO.mkdir(exist_ok=True)
    shutil.copy(trained / "adapter_model.safetensors", TO)
    config = json.loads((trained / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "models/builtin"
    (TO / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    base = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "models/builtin", dtype=torch.float32)
    tokens = torch.tensor([[0] + [(at * 37 + 11) % 900 for at in range(47)]])
    with torch.no_grad():
        bare = base(tokens).logits
        model = peft.PeftModel.from_pretrained(base, TO)
        logits = model(tokens).logits
    missing = [name for name, value in model.named_parameters() if "lora_B" in name and not value.abs().sum()]
    assert not missing, f"read as zero: {missing}"
    print("furthest from the base:", (logits - bare).abs().max().item())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    save_file({"tokens": tokens, "logits": logits.contiguous()}, TO / "expected.safetensors", metadata=versions)


main()
