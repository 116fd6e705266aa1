"""Engines and prompts that are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.tensorrt_llm.identity import identity, read_config
from moonpool.connectors.tensorrt_llm.layout import Memory, Refused, Shape
from moonpool.connectors.tensorrt_llm.limits import Foreign, check
from tests.connectors.tensorrt_llm.stub_engine import llm_args, write_model


def memory(*, described: bool) -> Memory:
    return Memory(4, ((),), "bfloat16", "cpu", described)


@pytest.mark.parametrize(
    ("args", "model", "sentence"),
    [
        ({"kv_cache": {"dtype": "nvfp4"}}, {}, "4-bit"),
        ({"quant_config": SimpleNamespace(kv_cache_quant_algo="QuantAlgo.NVFP4")}, {}, "4-bit"),
        ({"kv_cache": {"host_cache_size": 1 << 30}}, {}, "host_cache_size"),
        ({"kv_cache": {"max_attention_window": [512, 4096]}, "max_seq_len": 4096}, {}, "window"),
        ({"kv_cache": {"max_attention_window": [512]}}, {"max_position_embeddings": 4096}, "window"),
        ({"kv_cache": {"max_attention_window": [512]}}, {}, "window"),
        ({"sparse_attention_config": SimpleNamespace(algorithm="dsa")}, {}, "sparse"),
        ({}, {"index_head_dim": 128}, "sparse"),
        ({}, {"text_config": {"index_topk": 2048}}, "sparse"),
    ],
)
def test_what_one_tensor_does_not_show(
    tmp_path: Path, args: dict[str, Any], model: dict[str, Any], sentence: str
) -> None:
    folder = write_model(tmp_path, more=model)
    given, config = llm_args(folder, more=args), read_config(folder)
    with pytest.raises(Refused, match=sentence + ".* use_kv_cache_manager_v2"):
        check(given, folder, config, memory(described=False))
    check(given, folder, config, memory(described=True))


def test_a_checkpoint_that_says_four_bits(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(Refused, match="4-bit"):
        check(llm_args(folder), folder, read_config(folder), memory(described=False))


def test_what_one_tensor_shows(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    more = {"kv_cache": {"max_attention_window": [4096], "host_cache_size": 0}, "max_seq_len": 4096}
    check(llm_args(folder, more=more), folder, read_config(folder), memory(described=False))


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": {}, "image_token_id": 9},
        {"vision_config": {}, "video_token_index": 9},
        {"audio_config": {}, "audio_token_id": 9},
        {"thinker_config": {"image_token_index": 9, "text_config": {}}},
        {"vision_config": {"image_token_ids": [8, 9]}},
    ],
)
def test_tokens_that_stand_for_more(config: dict[str, Any]) -> None:
    foreign = Foreign.of(config)
    assert foreign.are_in([1, 9, 2])
    assert not foreign.are_in([1, 2])
    assert not foreign.are_in([])


def test_tokens_behind_the_vocabulary() -> None:
    assert Foreign.of({"vocab_size": 10}).are_in([1, 10])
    assert not Foreign.of({"vocab_size": 10, "pad_token_id": 3}).are_in([3, 9])
    taught = {"vision_config": {}, "image_token_id": 5, "text_config": {"vocab_size": 7}}
    assert Foreign.of(taught).are_in([7])


@pytest.mark.parametrize("key", ["vision_config", "audio_processor", "mm_projector", "img_processor"])
def test_a_model_that_does_not_say_what_stands_for_images(key: str) -> None:
    with pytest.raises(Refused, match="more than text"):
        Foreign.of({key: {"hidden_size": 4}, "vocab_size": 10})


class Sparse:
    """As objects of pydantic are."""

    def __init__(self, top: int) -> None:
        self.top = top

    def model_dump(self) -> dict[str, Any]:
        return {"top": self.top, "names": ["a"]}


class Schemes:
    """QuantConfig, of layers that differ."""

    quant_algo = "MIXED_PRECISION"
    kv_cache_quant_algo = None

    def __init__(self, layers: dict[str, str]) -> None:
        self.layers = layers

    def model_dump(self) -> dict[str, Any]:
        return {"quant_algo": self.quant_algo, "layers": self.layers}


def test_what_the_fingerprint_is_made_of(tmp_path: Path) -> None:
    folder = write_model(tmp_path)

    def fields(*, whole: bool = False, **more: Any) -> dict[str, Any]:
        given = llm_args(folder, more=more)
        form = Shape("form", (), (), True, whole)
        return identity(given, folder, read_config(folder), memory(described=True), form)

    plain = fields()
    assert fields() == plain
    for more in (
        {"kv_cache": {"max_attention_window": [512]}},
        {"kv_cache": {"sink_token_length": 1}},
        {"sparse_attention_config": Sparse(1)},
        {"model_kwargs": {"rope_theta": 1.0}},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"quant_config": Schemes({"layers.0": "FP8"})},
        {"moe_config": SimpleNamespace(backend="TRTLLM")},
        {"allreduce_strategy": "LOWPRECISION"},
        {"whole": True, "speculative_config": {"max_draft_len": 3}},
    ):
        assert fields(**more) != plain, more
    assert fields(sparse_attention_config=Sparse(1)) == fields(sparse_attention_config=Sparse(1))
    assert fields(sparse_attention_config=Sparse(1)) != fields(sparse_attention_config=Sparse(2))
    assert fields(speculative_config={"max_draft_len": 3}) == plain
    schemes = [fields(quant_config=Schemes({f"layers.{layer}": "FP8"})) for layer in range(2)]
    assert schemes[0] != schemes[1]


def test_length_counts_where_positions_depend_on_it(tmp_path: Path) -> None:
    def marks(**config: Any) -> list[Any]:
        folder = write_model(tmp_path / str(len(config)), more=config)
        form = Shape("form", (), (), True, False)
        args = [llm_args(folder, more={"max_seq_len": length}) for length in (1024, 2048, 4096)]
        return [identity(each, folder, read_config(folder), memory(described=True), form) for each in args]

    one, same, other = marks()
    assert one == same == other
    one, same, other = marks(
        rope_scaling={"type": "longrope"}, original_max_position_embeddings=2048, max_position_embeddings=8192
    )
    assert one == same
    assert same != other


def test_code_beside_the_weights_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    form = Shape("form", (), (), True, False)

    def mark() -> Any:
        args = llm_args(folder, more={"trust_remote_code": True})
        return identity(args, folder, read_config(folder), memory(described=True), form)

    before = mark()
    (folder / "modeling.py").write_text("a = 1")
    assert mark() != before
