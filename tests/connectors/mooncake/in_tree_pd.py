"""vLLM with its own MooncakeConnector over the drop-in, driven as tests/connectors/vllm/engine_driver.py is.

On a CPU the connector needs a name of torch that only a GPU has; nothing of vLLM or the drop-in is changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "connectors" / "mooncake")]

import torch  # noqa: E402

torch.accelerator.current_device_index = lambda: 0

from tests.connectors.vllm import engine_driver  # noqa: E402

if __name__ == "__main__":
    import mooncake.engine

    assert Path(mooncake.engine.__file__).is_relative_to(ROOT), "this is to run over the drop-in"
    engine_driver.main()
