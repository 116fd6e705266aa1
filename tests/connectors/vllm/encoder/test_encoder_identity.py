"""The fingerprint of an encoder's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moonpool.connectors.vllm.encoder.identity import encoder_identity
from moonpool.core.store import keys
from tests.connectors.vllm.configs import config


def engine(folder: Path, model_class: str = "Qwen2VLForConditionalGeneration") -> Any:
    (folder / "model.safetensors").write_bytes(b"weights")
    one = config(folder)
    one.model_config.architecture = model_class
    one.model_config.get_hidden_size = lambda: 64
    return one


def test_the_form_is_that_of_the_page(tmp_path: Path) -> None:
    """docs/keys.md has it."""
    fields = encoder_identity(engine(tmp_path))
    assert str(fields["form"]).startswith("encoder outputs of 64 by Qwen2VLForConditionalGeneration of vllm")
    assert (fields["block_tokens"], fields["kv_dtype"]) == (0, "float32")


def test_another_class_has_another_fingerprint(tmp_path: Path) -> None:
    """Hugging Face's code need not give what vLLM's gives (model_impl)."""
    others = engine(tmp_path, "TransformersMultiModalForCausalLM")
    first, second = (keys.fingerprint(encoder_identity(one)) for one in (engine(tmp_path), others))
    assert first != second
