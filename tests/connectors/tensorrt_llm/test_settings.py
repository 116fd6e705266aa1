"""The options, and what the model's own files say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.identity import model_folder, quantisation, read_config, revision
from moonpool.connectors.tensorrt_llm.settings import VARIABLE, Settings
from moonpool.connectors.tensorrt_llm.tokens import Chain, Known
from moonpool.core.errors import ConfigError
from moonpool.core.store.keys import block_digests, chain_seed
from tests.connectors.tensorrt_llm.stub_engine import llm_args, write_model


def test_options() -> None:
    assert Settings.read({}) == Settings()
    given = Settings.read({VARIABLE: '{"node": "/run/a.sock", "fetch": "8MiB", "save_decode": true}'})
    assert (given.node, given.fetch, given.save_decode) == ("/run/a.sock", 8 << 20, True)
    card = Settings.read({VARIABLE: '{"gpu": true, "gpu_ring": "128MiB", "gpu_copy_threads": 2}'})
    assert (card.gpu, card.gpu_ring, card.gpu_copy_threads, card.gpu_pin) == (True, 128 << 20, 2, 0)
    assert Settings.read({VARIABLE: '{"gpu_pin": "2GiB"}'}).gpu_pin == 2 << 30
    assert Settings.read({VARIABLE: '{"fetch": 0}'}).fetch == 0
    assert Settings.read({}, "moonpool:///run/b.sock").node == "/run/b.sock"
    assert Settings.read({VARIABLE: '{"node": "a"}'}, "moonpool://b").node == "a"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"nod": "a"}', "did you mean 'node'"),
        ('{"zzz": 1}', "the options are node, tenant"),
        ('{"token": "a"}', "MOONPOOL_CLUSTER_TOKEN_FILE"),
        ('{"node": ""}', "non-empty"),
        ('{"require_pool": 1}', "true or false"),
        ('{"fetch": -1}', "fetch"),
        ('{"fetch": true}', "fetch"),
        ('{"staging": "1GiB"}', "unknown key 'staging'"),
        ('{"gpu": 1}', "true or false"),
        ('{"gpu_ring": "1MiB"}', "from 8MiB to 2048MiB"),
        ('{"gpu_copy_threads": 0}', "from 1 to 64"),
        ('{"gpu_pin": "most"}', 'gpu_pin must be 0, a size such as 16GiB, or "all"'),
    ],
)
def test_options_that_are_wrong(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Settings.read({VARIABLE: text})


def test_a_node_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="own host"):
        Settings.read({VARIABLE: '{"node": "10.0.0.1:7700"}'}).socket()


def test_weights_are_told_apart(tmp_path: Path) -> None:
    args = llm_args(write_model(tmp_path / "a"))
    assert revision(args, tmp_path / "a") == revision(args, write_model(tmp_path / "b"))
    assert revision(args, tmp_path / "a") != revision(args, write_model(tmp_path / "c", weights=2))
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert revision(args, tmp_path / "snapshots" / commit) == f"commit {commit}"
    args.load_format = "LoadFormat.DUMMY"
    assert revision(args, tmp_path / "a") == "dummy tp=1"


def test_quantisation_counts(tmp_path: Path) -> None:
    args = llm_args(write_model(tmp_path))
    assert quantisation(args, tmp_path) is None
    args.quant_config = SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None)
    said = quantisation(args, tmp_path)
    assert said == {"file": None, "algorithms": ["FP8", "None"], "arguments": "SimpleNamespace"}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert quantisation(args, tmp_path) != said


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot tell which weights"):
        model_folder(llm_args(Path("no/such-model")))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="no object"):
        read_config(tmp_path)


def request(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(request_id=1, get_tokens=lambda beam: [1, 2], **fields)


def test_what_tokens_alone_do_not_name_is_left_out() -> None:
    assert compat.prompt_of(request()) == compat.Prompt(1, [1, 2], b"")
    assert compat.prompt_of(request(cache_salt="s")) == compat.Prompt(1, [1, 2], chain_seed(None, "s"))
    older = compat.prompt_of(request(cache_salt_id=5))
    assert older is not None
    assert older.seed == chain_seed(None, "id 5")
    for field in (
        {"lora_task_id": 0},
        {"multimodal_hashes": [[1]]},
        {"prompt_embedding_table": object()},
        {"is_dummy_request": True},
        {"sampling_config": SimpleNamespace(beam_width=2)},
    ):
        assert compat.prompt_of(request(**field)) is None


def test_chains_are_those_of_keys() -> None:
    tokens = list(range(30))
    chain = Chain(b"", 4)
    for start in range(0, 30, 7):
        chain.extend(tokens[start : start + 7])
    assert chain.digests == block_digests(tokens, 4)
    seeded = Chain(chain_seed(None, "salt"), 4)
    seeded.extend(tokens)
    assert seeded.digests == block_digests(tokens, 4, seed=chain_seed(None, "salt"))


def test_known_digests_have_a_maximum() -> None:
    known = Known(limit=2)
    known.add([b"1", b"2", b"3"])
    assert known.leading([b"2", b"3", b"1"]) == 2
    known.forget([b"2"])
    assert known.leading([b"2", b"3"]) == 0
