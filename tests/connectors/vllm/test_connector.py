"""The class vLLM talks to, with a configuration in vLLM's shape and no vLLM: what is read from it, and the
boundary that keeps the engine alive."""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm import compat, identity
from moonpool.connectors.vllm.connector import Mooncake
from moonpool.connectors.vllm.encoder import connector as encoder_connector
from moonpool.connectors.vllm.engine_config import layer_number, read_engine_config
from moonpool.connectors.vllm.layout import BlockLayout, GroupLayout, LayerView
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Load, Report, Step
from moonpool.connectors.vllm.pd.step_plan import End, HandoverStep, Pull
from moonpool.connectors.vllm.reach import FULL, Reach
from moonpool.connectors.vllm.states import State
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.store import keys
from tests.connectors.vllm.configs import Dtype, config
from tests.connectors.vllm.fakes import (
    COLUMNS,
    FINGERPRINT,
    FakeBlockPool,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    FakeTensor,
    New,
    node_at,
)

SCHEDULER, WORKER = compat.ConnectorRole.SCHEDULER, compat.ConnectorRole.WORKER
OUTSIDE_VLLM = compat.ConnectorBase.__module__.startswith("moonpool")
pytestmark = pytest.mark.skipif(not OUTSIDE_VLLM, reason="needs the stand-ins of vLLM's base classes")


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class CrossAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


def group(spec: Any = None, names: tuple[str, ...] = ("layers.0", "layers.1")) -> Any:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec or FullAttentionSpec(block_size=4))


def kv_cache(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups or [group()]))


# What is read from the configuration


def test_facts() -> None:
    engine_config = read_engine_config(config(), kv_cache())
    assert (engine_config.block_tokens, engine_config.kv_heads, engine_config.workers) == (4, 2, 1)
    assert engine_config.groups == (("layers.0", "layers.1"),)
    assert engine_config.refusal == ""
    assert engine_config.recomputes
    assert not engine_config.zeroes_blocks
    mixed = kv_cache()
    mixed.needs_kv_cache_zeroing = True
    assert read_engine_config(config(), mixed).zeroes_blocks


def test_models_whose_layers_have_unlike_numbers_of_heads() -> None:
    """Under whatever names their configs have them."""

    def unlike(**fields: Any) -> bool:
        one = config()
        for name, value in fields.items():
            setattr(one.model_config.hf_text_config, name, value)
        return read_engine_config(one, kv_cache()).unlike_heads

    assert not unlike()
    assert not unlike(num_key_value_heads=4)
    assert not unlike(num_key_value_heads=4, per_layer_config={3: {"head_dim": 64}})
    assert unlike(num_key_value_heads=4, per_layer_config={3: {"num_key_value_heads": 1}})
    assert unlike(num_key_value_heads=4, swa_num_key_value_heads=8)
    assert unlike(num_key_value_heads_per_layer=[4, 4, 2])
    one = config()
    one.model_config.hf_text_config.num_key_value_heads, one.model_config.use_mla = [4, 2], True
    assert not read_engine_config(one, kv_cache()).unlike_heads


def refusal(change: Any, *groups: Any) -> str:
    one = config()
    change(one)
    return read_engine_config(one, kv_cache(*groups)).refusal


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(one: Any) -> None: ...

    assert refusal(keep) == ""
    assert "CrossAttention layers" in refusal(keep, group(CrossAttentionSpec(block_size=4)))
    nested = SimpleNamespace(block_size=4, kv_cache_specs={"layers.0": CrossAttentionSpec(block_size=4)})
    assert "CrossAttention layers" in refusal(keep, group(nested))
    two = (group(names=("layers.0",)), group(names=("layers.1",)))
    monkeypatch.setattr(compat, "TransferResults", None)
    assert "0.30 or newer" in refusal(keep, *two)
    monkeypatch.setattr(compat, "TransferResults", object)
    assert refusal(keep, *two) == ""
    unlike = read_engine_config(config(), kv_cache(group(), group(FullAttentionSpec(block_size=8))))
    assert (unlike.refusal, unlike.block_tokens, unlike.splits) == ("", 8, (2, 1))
    assert "decode_context_parallel_size" in refusal(
        lambda one: setattr(one.parallel_config, "decode_context_parallel_size", 2)
    )
    assert "draft models" in refusal(
        lambda one: setattr(one, "speculative_config", SimpleNamespace(method="eagle"))
    )
    assert refusal(lambda one: setattr(one, "speculative_config", SimpleNamespace(method="ngram"))) == ""
    assert "calculate_kv_scales" in refusal(
        lambda one: setattr(one.cache_config, "calculate_kv_scales", True)
    )


@pytest.mark.parametrize("executor", ["external_launcher", type("ExecutorWithExternalLauncher", (), {})])
def test_ranks_with_schedulers_of_their_own(executor: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have to decide alike."""

    def launched(ranks: int, backend: object = executor) -> Any:
        one = config()
        one.parallel_config.distributed_executor_backend = backend
        one.parallel_config.world_size = ranks
        one.model_config.multimodal_config = SimpleNamespace()
        return one

    monkeypatch.setattr(compat, "watch_weights", lambda: True)
    for refused in (encoder_connector._refusal, lambda one: read_engine_config(one, kv_cache()).refusal):
        assert "its own scheduler" in refused(launched(2))
        assert refused(launched(1)) == ""
        assert refused(launched(2, "mp")) == ""


def test_windows_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TransferResults", object)
    window = SlidingWindowSpec(block_size=4, sliding_window=64)
    chunk = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=32)
    mixed = kv_cache(group(), group(window), group(chunk))
    engine_config = read_engine_config(config(), mixed)
    assert engine_config.refusal == ""
    assert engine_config.reaches == (FULL, Reach(window=64), Reach(chunk=32))
    assert engine_config.has_windows
    assert not read_engine_config(config(), kv_cache()).has_windows

    def keep(one: Any) -> None: ...

    nested = SimpleNamespace(block_size=4, kv_cache_specs={"0": FullAttentionSpec(block_size=4), "1": window})
    assert "look back differently far" in refusal(keep, group(nested))
    assert "CrossAttention layers" in refusal(keep, group(window), group(CrossAttentionSpec(block_size=4)))
    both = SlidingWindowSpec(block_size=4, sliding_window=64, non_causal=True)
    assert "SlidingWindow layers" in refusal(keep, group(both))
    monkeypatch.setattr(compat, "TransferResults", None)
    assert "sliding windows or several KV cache groups need vLLM 0.30" in refusal(keep, group(window))


def states(**changes: Any) -> MambaSpec:
    fields: dict[str, Any] = {
        "block_size": 4,
        "shapes": ((3, 8),),
        "dtypes": (SimpleNamespace(itemsize=2),),
        "mamba_type": SimpleNamespace(name="GDN_ATTN"),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**fields | changes)


def test_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TransferResults", object)
    mixed = kv_cache(group(), group(states(), ("layers.2",)))
    engine_config = read_engine_config(config(), mixed)
    assert engine_config.refusal == ""
    assert engine_config.reaches == (FULL, Reach(state=True))
    assert engine_config.states[0] is None
    assert engine_config.states[1] is not None
    assert engine_config.states[1].bytes == 48
    assert engine_config.has_states
    assert engine_config.has_windows
    assert not read_engine_config(config(), kv_cache()).has_states

    def keep(one: Any) -> None: ...

    without = states(mamba_cache_mode="none", block_size=2048)
    assert "runs with mamba_cache_mode none" in refusal(keep, group(), group(without))
    assert "prefix_match_unit" in refusal(
        lambda one: setattr(one.cache_config, "prefix_match_unit", 2), group(), group(states())
    )
    ngram = SimpleNamespace(method="ngram")
    assert "states are not stored yet with speculative decoding" in refusal(
        lambda one: setattr(one, "speculative_config", ngram), group(states())
    )
    with monkeypatch.context() as older:
        older.setattr(compat, "tells_snapshots", lambda: False)
        assert "need vLLM 0.32 or newer" in refusal(keep, group(states()))
    rounding = SimpleNamespace(enable_stochastic_rounding=True)
    assert "rounded at random" in refusal(lambda one: setattr(one, "mamba_config", rounding), group(states()))
    short = states(mamba_type=SimpleNamespace(name="SHORT_CONV"))
    for device, refused in (("cpu", True), ("cuda", False)):
        where = SimpleNamespace(device_type=device)
        why = refusal(lambda one, where=where: setattr(one, "device_config", where), group(short))
        assert ("short convolutions" in why) == refused
    unlike = {"layers.0": states(), "layers.1": states(shapes=((4, 8),))}
    nested = SimpleNamespace(block_size=4, kv_cache_specs=unlike)
    assert "states of different shapes or types" in refusal(keep, group(nested))
    assert "another number of tokens" in refusal(keep, group(), group(states(block_size=8)))


def test_engines_that_cannot_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(one: Any) -> None:
        one.scheduler_config.enable_chunked_prefill = one.cache_config.enable_prefix_caching = False

    def mla(one: Any) -> None:
        one.model_config.use_mla = True

    def mla_off(one: Any) -> None:
        mla(one)
        off(one)

    assert refusal(off) == ""  # the user's choice, which changes no answer
    assert refusal(mla) == ""
    assert "answers wrongly when it continues from KV" in refusal(mla_off)
    assert "does not support prefix caching" in refusal(
        lambda one: setattr(one.model_config, "is_prefix_caching_supported", False)
    )
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 2048}

    def transformers(one: Any) -> None:
        one.model_config.hf_text_config.rope_parameters = longrope
        one.model_config.using_transformers_backend = lambda: True

    assert "angles of longrope positions" in refusal(transformers)


def test_weights_that_no_file_tells() -> None:
    for name in ("tensorizer", "modelexpress", "ipc_cache", "mine"):
        said = refusal(lambda one, name=name: setattr(one.load_config, "load_format", name))
        assert f"load_format {name} takes weights from elsewhere" in said
    assert "may be replaced while it runs" in refusal(
        lambda one: setattr(one, "weight_transfer_config", SimpleNamespace(backend="nccl"))
    )


def test_media() -> None:
    one = config()
    assert read_engine_config(one, kv_cache()).media_form == ""
    one.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_type="lru")
    assert read_engine_config(one, kv_cache()).media_form
    assert read_engine_config(one, kv_cache()).media_refusal == ""
    one.model_config.multimodal_config.mm_processor_cache_type = "shm"
    assert "shm" in read_engine_config(one, kv_cache()).media_refusal
    assert not read_engine_config(one, kv_cache()).takes_embeddings
    one.model_config.enable_prompt_embeds = True
    assert read_engine_config(one, kv_cache()).takes_embeddings


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("transformer.h.3.attn", 3),
        ("model.decoder.5.x", 5),
        ("attn", 0),
    ],
)
def test_layer_numbers(name: str, number: int) -> None:
    assert layer_number(name) == number


def fingerprint(one: Any) -> bytes:
    return keys.fingerprint(identity.identity(one, block_tokens=4, kv_dtype="float32", form="f"))


def test_fingerprint_is_about_meaning(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    one = config(tmp_path)
    same = copy.deepcopy(one)
    same.model_config.hf_config.transformers_version = "6"
    same.model_config.hf_config._name_or_path = "elsewhere"
    same.parallel_config.tensor_parallel_size = 4
    same.load_config.load_format = "runai_streamer"
    same.lora_config = SimpleNamespace(lora_dtype=Dtype("float32"), target_modules=None)
    assert fingerprint(same) == fingerprint(one)
    changes: list[tuple[Any, str, Any]] = [
        (lambda c: c.model_config.hf_config, "hidden_size", 512),
        (lambda c: c.model_config.hf_config, "rope_parameters", {"rope_theta": 5e5}),
        (lambda c: c.model_config, "dtype", Dtype("bfloat16")),
        (lambda c: c.model_config, "quantization", "fp8"),
        (lambda c: c.model_config, "quantization_config", {"linear": "fp8_per_tensor"}),
        (lambda c: c, "quant_config", SimpleNamespace(ignored_layers=["lm_head"])),
        (lambda c: c.model_config, "disable_sliding_window", True),
        (lambda c: c.cache_config, "sliding_window", 64),
        (lambda c: c, "additional_config", {"fast": True}),
        (lambda c: c.load_config, "load_format", "pt"),
        (lambda c: c, "kernel_config", SimpleNamespace(linear_backend="marlin")),
        (lambda c: c, "lora_config", SimpleNamespace(lora_dtype=Dtype("float16"))),
    ]
    seen = {fingerprint(one)}
    for place, name, value in changes:
        other = copy.deepcopy(one)
        setattr(place(other), name, value)
        seen.add(fingerprint(other))
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 100)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))  # another time, however coarse the clock of files is
    seen.add(fingerprint(one))
    assert len(seen) == len(changes) + 2


def test_length_counts_where_positions_depend_on_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    one, other = config(tmp_path), config(tmp_path)
    one.model_config.max_model_len, other.model_config.max_model_len = 2048, 4096
    assert fingerprint(one) == fingerprint(other)
    for each in (one, other):
        each.model_config.hf_text_config.rope_parameters = {
            "rope_type": "longrope",
            "original_max_position_embeddings": 2048,
        }
    assert fingerprint(one) != fingerprint(other)
    other.model_config.max_model_len = 1024
    assert fingerprint(one) == fingerprint(other)


def test_variables_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    before = fingerprint(config(tmp_path))
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert fingerprint(config(tmp_path)) != before


def test_code_beside_the_weights_counts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    one = config(tmp_path)
    before = fingerprint(one)
    (tmp_path / "modeling.py").write_text("a = 1")
    assert fingerprint(one) == before  # vLLM does not run it
    one.model_config.trust_remote_code = True
    first = fingerprint(one)
    (tmp_path / "modeling.py").write_text("a = 2")
    assert len({before, first, fingerprint(one)}) == 3


@dataclasses.dataclass
class CacheSection:
    """A section of a vLLM that has a field which nobody has looked at."""

    cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    kv_rotation: str = "none"


def test_an_unknown_argument_counts_when_it_is_set(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    one, other = config(tmp_path), config(tmp_path)
    before = fingerprint(one)
    one.cache_config = CacheSection()
    assert fingerprint(one) == before
    other.cache_config = CacheSection(kv_rotation="hadamard")
    assert fingerprint(other) != before


def layer(number: int, content: int = 256, dtype: str = "float32") -> LayerView:
    return LayerView(f"layers.{number}", number, 0, 8, 2, 32, content, 1, 1, 1, dtype)


def form_of(*layers: LayerView, **types: str) -> str:
    one = config()
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    one.compilation_config.static_forward_context = {
        view.name: SimpleNamespace(
            attn_backend=backend, isa="vec", kv_cache_dtype=types.get(f"l{view.number}", "auto")
        )
        for view in layers
    }
    return identity.form(one, BlockLayout((GroupLayout(layers, 1),), 32))


def test_form_says_once_what_all_layers_have() -> None:
    alike = form_of(layer(0), layer(1))
    assert alike == "vllm CPU_ATTN/vec/32/float32/256"
    assert alike == form_of(layer(5), layer(6), layer(7))  # another stage of a pipeline


def test_form_names_layers_that_differ() -> None:
    fp8 = {"l0": "fp8", "l1": "fp8", "l2": "fp8"}
    forms = [
        form_of(layer(0, 64), layer(1, 64), layer(2, 64), **fp8),
        form_of(layer(0), layer(1, 64), layer(2, 64), **fp8 | {"l0": "auto"}),
        form_of(layer(0, 64), layer(1), layer(2, 64), **fp8 | {"l1": "auto"}),
    ]
    assert len(set(forms)) == 3
    assert forms[1] == "vllm 0:CPU_ATTN/vec/32/float32/256 1,2:CPU_ATTN/vec/32/fp8/64"
    assert form_of(layer(0, 64), l0="fp8_e5m2") != form_of(layer(0, 64), l0="fp8_e4m3")


def test_form_tells_groups_and_windows_apart() -> None:
    """Objects are named by their group, so that the same name must be the same layers."""
    layers = [layer(number) for number in range(4)]

    def form(members: tuple[tuple[int, ...], ...], *reaches: Reach) -> str:
        groups = tuple(GroupLayout(tuple(layers[number] for number in each), 1) for each in members)
        return identity.form(config(), BlockLayout(groups, 32), reaches)

    order = form(((0, 1, 2, 3),), FULL)
    window = Reach(window=64)
    forms = [
        form(((3,), (0, 1, 2)), FULL, window),
        form(((2,), (0, 1, 3)), FULL, window),
        form(((3,), (0,), (1,), (2,)), FULL, window, window, window),
        form(((3,), (0, 1, 2)), FULL, Reach(window=65)),
        form(((3,), (0, 1, 2)), FULL, Reach(chunk=64)),
        form(((0, 1, 2, 3),), window),
        order,
    ]
    assert len(set(forms)) == len(forms)
    assert forms[0] == f"{order} groups 3:full 0,1,2:window 64"
    parts = (GroupLayout((layers[3],), 1), GroupLayout((layers[0],), 1, split=2))
    unlike = identity.form(config(), BlockLayout(parts, 64), (FULL, window), (1, 4))
    assert unlike == f"{order} heads 1,4 parts 1,2 groups 3:full 0:window 64"


def test_form_tells_states_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device_name", lambda: "cpu x86_64")
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
    pages = dataclasses.replace(layer(0), heads=1, tokens=1)

    def form(state: str, ranks: int = 1) -> str:
        one = config()
        one.parallel_config.tensor_parallel_size = ranks
        groups = (GroupLayout((layer(1),), 1), GroupLayout((pages,), 1, State(state, 48)))
        return identity.form(one, BlockLayout(groups, 32), (FULL, Reach(state=True)))

    forms = [form("GDN_ATTN 3x8 bfloat16"), form("GDN_ATTN 3x8 float32"), form("GDN_ATTN 3x8 bfloat16", 2)]
    assert len(set(forms)) == 3
    assert forms[0].endswith(
        " groups 1:full 0:state (GDN_ATTN 3x8 bfloat16) of 1 ranks on cpu x86_64 by vllm 0.32.0"
    )


def test_scales_count_unless_they_are_one() -> None:
    one = config()
    attention = SimpleNamespace(kv_cache_dtype="fp8", _k_scale_float=1.0, _v_scale_float=1.0)
    one.compilation_config.static_forward_context = {"layers.0": attention}
    layout = BlockLayout((GroupLayout((layer(0),), 1),), 32)
    before = identity.form(one, layout)
    attention._k_scale_float = 0.5
    assert identity.form(one, layout) == f"{before}/scales 0.5 1.0"


def test_revisions(tmp_path: Path) -> None:
    hub = config("org/model")
    with pytest.raises(ConfigError, match="cannot tell which weights 'org/model'"):
        identity.revision(hub)
    hub.model_config.hf_config._commit_hash = "a" * 40
    assert identity.revision(hub) == "commit " + "a" * 40
    hub.load_config.load_format = "dummy"
    assert identity.revision(hub) == "dummy tp=1 pp=1"


def test_kv_dtype() -> None:
    one = config()
    assert identity.kv_dtype(one, Dtype("bfloat16")) == "bfloat16"
    one.cache_config.cache_dtype = "fp8_e4m3"
    assert identity.kv_dtype(one, Dtype("uint8")) == "fp8_e4m3"


# The boundary


def scheduler(monkeypatch: pytest.MonkeyPatch, pool: FakePool | None = None) -> Mooncake:
    connector = Mooncake(config(), SCHEDULER, kv_cache())
    monkeypatch.setattr(connector._sched, "_open_node", node_at(pool or FakePool()))
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(FINGERPRINT, COLUMNS)})
    return connector


def test_unknown_option() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tenant'"):
        Mooncake(config(tenat="x"), SCHEDULER, kv_cache())


def test_require_pool_without_a_node(tmp_path: Path) -> None:
    connector = Mooncake(config(require_pool=True, node=str(tmp_path / "none.sock")), SCHEDULER, kv_cache())
    with pytest.raises(Unavailable):
        connector.set_xfer_handshake_metadata({0: Handshake(FINGERPRINT, COLUMNS)})


def test_policy_fail_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    one = config()
    one.kv_transfer_config.kv_load_failure_policy = "fail"
    Mooncake(one, SCHEDULER, kv_cache())
    Mooncake(one, WORKER, kv_cache())
    (record,) = caplog.records
    assert '"recompute" computes them instead' in record.getMessage()


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_before_anything_is_known_nothing_happens(role: compat.ConnectorRole) -> None:
    connector = Mooncake(config(), role, kv_cache())
    request = FakeRequest("r", list(range(20)))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, FakeBlocks(([],)), 0)
    assert connector.build_connector_meta(FakeStep()) is NOTHING
    connector.bind_connector_metadata(NOTHING)
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished({"r"}) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    assert connector.get_kv_connector_stats() is None
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert not connector.has_pending_push_work()
    connector.shutdown()


@pytest.mark.parametrize(
    "broken",
    [
        "arrived",
        "matched_tokens",
        "admitted",
        "build_step",
        "step_ended",
        "finished",
        "has_pending_work",
        "has_pending_frees",
        "forget_everything_stored",
    ],
)
def test_no_exception_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    connector = scheduler(monkeypatch)
    half = connector._sched
    assert half is not None
    original = half.build_step

    def fail(*args: Any) -> None:
        monkeypatch.setattr(half, "build_step", original)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(half, broken, fail)
    request = FakeRequest("r", list(range(20)))
    connector.on_new_request(request)
    tokens, _ = connector.get_num_new_matched_tokens(request, 0)
    assert tokens in (0, None)
    connector.update_state_after_alloc(request, FakeBlocks(([5, 6, 7],)), 8)
    step = connector.build_connector_meta(FakeStep())
    connector.update_connector_output(FakeOutput({"r"}))
    assert connector.request_finished(request, [])[0] is False
    assert connector.reset_cache() is (broken != "forget_everything_stored")
    connector.has_pending_push_work()
    connector.has_pending_block_frees()
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["survived_errors"] >= 1
    if broken == "admitted":
        (load,) = step.loads
        assert load.block_ids == ((6, 7),)


@pytest.mark.parametrize("also", ["", "give_up_step"])
def test_no_fault_of_a_plan_kills_the_engine(monkeypatch: pytest.MonkeyPatch, also: str) -> None:
    """Not the second attempt's, nor one in what tidies up after the first."""
    connector = scheduler(monkeypatch)

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    for name in filter(None, ("build_step", also)):
        monkeypatch.setattr(connector._sched, name, fail)
    assert connector.build_connector_meta(FakeStep()) is NOTHING
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["survived_errors"] == (3 if also else 2)


@pytest.mark.parametrize("broken", ["jump", "chunk_tokens", "tokens_to_place"])
def test_no_exception_reaches_the_scheduler_class(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    connector = scheduler(monkeypatch)
    assert connector._sched is not None
    meetings, request = connector._sched.meetings, FakeRequest("r", list(range(20)))

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    assert connector.allow_meetings("the engine speculates") is None
    assert connector.allow_meetings("") is meetings
    monkeypatch.setattr(meetings, broken, fail)
    assert connector.before_schedule() == []
    assert connector.chunk_tokens(request, 0, 17) == 17
    assert connector.tokens_to_place(request) == 0
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["survived_errors"] == 1
    worker = Mooncake(config(), WORKER, kv_cache())
    assert worker.allow_meetings("") is None


def saving(connector: Mooncake, pool: FakePool) -> tuple[FakeBlockPool, FakeStep]:
    """(the engine's blocks, a step in which a request fills four of them that are to be saved)."""
    blocks, request = FakeBlockPool(), FakeRequest("r", list(range(18)))
    assert connector._sched is not None
    connector._sched.bind_block_pool(blocks)
    connector.on_new_request(request)
    pool.answer_prefix(0)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    ids = list(range(100, 105))
    connector.update_state_after_alloc(request, FakeBlocks((ids,)), 0)
    return blocks, FakeStep([New("r", (ids,), 0)], num_scheduled_tokens={"r": 18})


@pytest.mark.parametrize("earlier", [False, True])
def test_saves_of_a_step_that_was_not_planned_hold_nothing(
    monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Nobody would report their end. Those of an earlier step are under way, and end as ever."""
    pool = FakePool()
    connector = scheduler(monkeypatch, pool)
    blocks, filling = saving(connector, pool)
    half, saves = connector._sched, ()
    assert half is not None
    if earlier:
        saves = connector.build_connector_meta(filling).saves
        assert len(saves) == 1

    def fail(output: Any) -> None:
        raise RuntimeError("unexpected")

    with monkeypatch.context() as broken:
        broken.setattr(type(half.handover), "is_busy", True)
        broken.setattr(half.handover, "plan", fail)
        assert connector.build_connector_meta(FakeStep() if earlier else filling) is NOTHING
    assert blocks.held() == ([100, 101, 102, 103] if earlier else [])
    connector.update_connector_output(
        FakeOutput(kv_connector_worker_meta=Report(saved={save.job_id: 1 for save in saves}))
    )
    assert blocks.held() == []
    assert not connector.has_pending_push_work()


def test_what_other_engines_said_does_not_keep_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    connector = scheduler(monkeypatch, pool)
    blocks, filling = saving(connector, pool)
    (save,) = connector.build_connector_meta(filling).saves
    assert blocks.held()

    def fail(report: Report) -> None:
        raise RuntimeError("unexpected")

    assert connector._sched is not None
    monkeypatch.setattr(connector._sched.handover, "heard", fail)
    connector.update_connector_output(
        FakeOutput(kv_connector_worker_meta=Report(saved={save.job_id: 1}, heartbeats={7}))
    )
    assert blocks.held() == []
    assert not connector.has_pending_push_work()


def test_a_request_whose_end_failed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    connector = scheduler(monkeypatch, pool)
    request = FakeRequest("r", list(range(20)))
    connector.on_new_request(request)
    pool.answer_prefix(4)
    assert connector.get_num_new_matched_tokens(request, 0) == (16, True)

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    assert connector._sched is not None
    monkeypatch.setattr(connector._sched.handover, "finished", fail)
    assert connector.request_finished(request, []) == (False, None)
    assert pool.released == [7]


def test_vllms_own_reset_ends_hand_overs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells the connector nothing of it, and fails when blocks are held."""
    connector = scheduler(monkeypatch)
    half, calls = connector._sched, []
    assert half is not None
    monkeypatch.setattr(half.handover, "forget_all", lambda: calls.append("ours"))
    pool: Any = SimpleNamespace(blocks=[], reset_prefix_cache=lambda: calls.append("vLLM's") or True)
    connector.bind_gpu_block_pool(pool)
    assert pool.reset_prefix_cache() is True
    assert calls == ["ours", "vLLM's"]

    def fail() -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(half.handover, "forget_all", fail)
    assert pool.reset_prefix_cache() is True


def test_handshakes_of_other_connectors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MultiConnector gives the handshake of one of its connectors to all of them, or none."""
    connector = Mooncake(config(), SCHEDULER, kv_cache())
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): compat.HandshakeMetadata()})  # type: ignore[dict-item]
    assert connector.build_connector_meta(FakeStep()).greets
    worker = Mooncake(config(), WORKER, kv_cache())
    assert worker.get_handshake_metadata() is not None
    monkeypatch.setattr(compat, "is_one_of_several", lambda one: one is worker)
    assert worker.get_handshake_metadata() is None
    worker.bind_connector_metadata(Step(greets=True))
    report = worker.build_connector_worker_meta()
    assert [hand.refusal for hand in report.handshakes] == ["vLLM registered no KV caches"]


class Faulty:
    """A handover_worker that fails in the middle of what it is told."""

    def __init__(self) -> None:
        self.revoked, self.failed = 0, 0
        self.has_news = False

    def begin(self, step: HandoverStep) -> None:
        raise RuntimeError("unexpected")

    pull = begin

    def revoke(self) -> None:
        self.revoked += 1

    def fail_pulls(self, step: HandoverStep, why: str) -> None:
        self.failed += 1


def test_a_fault_of_a_hand_over_leaves_nothing_valid_and_no_pull_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector, handover_worker = Mooncake(config(), WORKER, kv_cache()), Faulty()
    assert connector._worker is not None
    monkeypatch.setattr(connector._worker, "_handover_worker", handover_worker)
    handover = HandoverStep(ends=(End(7, "over"),), pulls=(Pull("r", 0, ((3,),)),))
    connector.bind_connector_metadata(Step(handover=handover))
    connector.start_load_kv(None)
    assert (handover_worker.revoked, handover_worker.failed) == (1, 1)
    assert connector.get_finished(set()) == (
        None,
        None,
    )  # the handover_worker tells it, when nothing is read any more


def test_no_exception_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = Mooncake(config(), WORKER, kv_cache())

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    for name in ("start_loads", "start_saves", "poll"):
        monkeypatch.setattr(connector._worker, name, fail)
    connector.bind_connector_metadata(Step((Load("r", 0, b"", b"", b"", ((3,),)),)))
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, {"r"})
    assert connector.get_block_ids_with_load_errors() == {3}


def test_messages_survive_pickling() -> None:
    import pickle

    step = Step((Load("r", 2, b"n", b"i", b"d", ((1, 2),)),))
    assert pickle.loads(pickle.dumps(step)) == step
    assert pickle.loads(pickle.dumps(Handshake(FINGERPRINT, COLUMNS))) == Handshake(FINGERPRINT, COLUMNS)
    assert dataclasses.is_dataclass(step)


def test_a_card_is_left_alone_where_the_option_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "parallel_ranks", lambda: (0, 0))
    connector = Mooncake(config(gpu=False), WORKER, kv_cache())
    caches = {f"layers.{n}": FakeTensor(np.zeros((8, 2, 4, 16), np.float32), device="cuda") for n in (0, 1)}
    connector.register_kv_caches(caches)
    hand = connector.get_handshake_metadata()
    assert hand is not None
    assert '"gpu": false' in hand.refusal


@pytest.mark.parametrize("follows", [False, True])
def test_sleep_mode_with_a_card_needs_a_vllm_that_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    asleep = config()
    asleep.model_config.enable_sleep_mode = True
    monkeypatch.setattr(compat, "parallel_ranks", lambda: (0, 0))
    for name in ("unregister_kv_caches", "restore_kv_caches") if follows else ():
        monkeypatch.setattr(compat.ConnectorBase, name, lambda self: None, raising=False)
    opened = []

    def open_device(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        raise Refused("no card here")

    monkeypatch.setattr("moonpool.connectors.vllm.connector.DeviceMemory", open_device)
    connector = Mooncake(asleep, WORKER, kv_cache())
    shape = (8, 2, 4, 16)
    names = ("layers.0", "layers.1")
    connector.register_kv_caches(
        {name: FakeTensor(np.zeros(shape, np.float32), device="cuda") for name in names}
    )
    hand = connector.get_handshake_metadata()
    assert hand is not None
    assert hand.refusal == "no card here" if follows else "0.33 and newer say when" in hand.refusal
    assert bool(opened) == follows


def test_the_worker_is_told_of_sleep_and_no_fault_of_it_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector, calls = Mooncake(config(), WORKER, kv_cache()), []
    monkeypatch.setattr(connector._worker, "sleep", lambda: calls.append("sleep"))
    monkeypatch.setattr(connector._worker, "wake_up", lambda caches: calls.append(caches))
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    connector.restore_kv_caches({"layers.0": 1})
    assert calls == ["sleep", None, {"layers.0": 1}]

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(connector._worker, name, fail)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["survived_errors"] == 2


def test_a_configuration_that_is_not_understood_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a vLLM that has renamed what the fingerprint is made of: the engine starts, without the pool."""
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    strange = config(tmp_path)
    monkeypatch.setattr(compat, "parallel_ranks", lambda: (0, 0))
    connector = Mooncake(strange, WORKER, kv_cache())
    del strange.load_config
    caches = {name: FakeTensor(np.zeros((8, 2, 4, 16), np.float32)) for name in ("layers.0", "layers.1")}
    connector.register_kv_caches(caches)
    hand = connector.get_handshake_metadata()
    assert hand is not None
    assert hand.refusal == "what its KV depends on cannot be read from its configuration (AttributeError)"
