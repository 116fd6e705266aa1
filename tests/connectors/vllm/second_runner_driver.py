"""As engine_driver.py, with vLLM's model runner V2, whose kernels Triton's interpreter runs on a CPU.

Run by tests with the interpreter that has vLLM: ``second_runner_driver.py ANSWER_FD CONFIG_JSON``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

# vLLM uses Triton on a CPU where it has a compiler for one, which the interpreter does without.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.connectors.vllm.engine_driver import main  # noqa: E402 - what vLLM looks at is set before

if __name__ == "__main__":
    main()
