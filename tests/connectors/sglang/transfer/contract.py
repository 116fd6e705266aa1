"""What only a Python with SGLang can tell: our hook, class and store in SGLang's own plugin loader, encoder
and embedding cache. ``contract.py NODE_SOCKET MODEL`` prints one line for each thing that holds.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from moonpool.connectors.sglang.transfer import hook, settings


@contextmanager
def ends(why: str, kind: type[BaseException] = SystemExit) -> Any:
    """The process would end with that sentence."""
    said = "nothing"
    try:
        yield
    except kind as end:
        said = str(end)
    assert why in said, said


def early_importer(module: ModuleType) -> ModuleType:
    """A module that has the class by ``from ... import`` before plugins are loaded."""
    early = ModuleType("early")
    early.Engine = getattr(module, hook.CLASS)  # type: ignore[attr-defined]
    sys.modules["early"] = early
    return early


def load() -> tuple[ModuleType, type]:
    """Loads SGLang's plugins as its servers do; the module of the hook, and SGLang's own class."""
    from sglang.srt.plugins import load_plugins

    module = import_module(hook.MODULE)
    original = getattr(module, hook.CLASS)
    assert hook.mismatch(module) == ""
    early = early_importer(module)
    load_plugins()
    from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine

    assert getattr(module, hook.CLASS) is MoonpoolTransferEngine
    assert early.Engine is MoonpoolTransferEngine
    with ends("makes its own MooncakeTransferEngine"):
        original("127.0.0.1")
    return module, original


def test_the_hook() -> None:
    module, original = load()
    for name, parameters in hook.METHODS.items():
        if name != "initialize":
            ours = inspect.signature(getattr(getattr(module, hook.CLASS), name)).parameters
            assert tuple(ours)[1:] == parameters, name
    assert module.init_mooncake_transfer_engine("127.0.0.1").send_probe("127.0.0.1:1") < 0
    start = getattr(module, hook.INIT)
    args = SimpleNamespace(
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        encoder_only=False,
        language_only=False,
        elastic_ep_backend=None,
        enable_elastic_expert_backup=False,
        device="cpu",
    )
    with ends("--disaggregation-transfer-backend is nixl"):
        start(server_args=args, gpu_id=0)
    late = ModuleType("late")
    setattr(late, hook.CLASS, original)
    sys.modules["late"] = late
    with ends("the module late still has"):
        start(server_args=args, gpu_id=0)
    del sys.modules["late"]


def test_the_command_line() -> None:
    from sglang.srt.server_args import prepare_server_args

    flags = ["--model-path", sys.argv[2], "--device", "cpu", "--disaggregation-mode", "prefill"]
    with ends("--disaggregation-transfer-backend is nixl"):
        prepare_server_args([*flags, "--disaggregation-transfer-backend", "nixl"])
    with ends("memory of npu"):
        prepare_server_args([*flags[:2], "--device", "npu", *flags[4:]])
    prepare_server_args([*flags, "--disaggregation-transfer-backend", "mooncake_tcp"])


def on_the_cpu(call: Callable[[], Any]) -> Any:
    """With memory of the host where SGLang wants a GPU's."""
    import torch

    empty = torch.empty
    torch.empty = lambda *args, device=None, **kwargs: empty(*args, **kwargs)
    try:
        return call()
    finally:
        torch.empty = empty


def encoder_modules() -> tuple[Any, Any]:
    try:
        names = "sglang.srt.disaggregation.encoder.receiver", "sglang.srt.disaggregation.encoder.server"
        return import_module(names[0]), import_module(names[1])
    except ModuleNotFoundError:
        names = "sglang.srt.disaggregation.encode_receiver", "sglang.srt.disaggregation.encode_server"
        return import_module(names[0]), import_module(names[1])


def encoder_of(server: Any, engine: Any) -> Any:
    """SGLang's encoder without a model: what sends an embedding that was made."""
    import zmq

    encoder = server.MMEncoder.__new__(server.MMEncoder)
    vars(encoder).update(
        engine=engine,
        transfer_backend="mooncake",
        sync_context=zmq.Context(),
        executor=ThreadPoolExecutor(1),
        send_timeout=20.0,
        _element_size=4,
        _forward_ready_events={},
        _forward_results={},
    )
    server.get_disagg = lambda: SimpleNamespace(encoder_transfer_backend="mooncake")
    return encoder


def test_embeddings_from_an_encoder() -> None:
    """Into SGLang's pool of landing buffers, by its encoder's own code."""
    import torch
    import zmq
    from sglang.srt.managers.schedule_batch import Modality

    from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine

    receiver, server = encoder_modules()
    language, sender = MoonpoolTransferEngine("127.0.0.1"), MoonpoolTransferEngine("127.0.0.1")
    if hasattr(receiver, "EmbeddingPool"):
        pool = on_the_cpu(lambda: receiver.EmbeddingPool(0, 1 << 20, engine=language))
    else:  # 0.5.18
        pool = on_the_cpu(lambda: receiver.MooncakeEmbeddingPool(language, 0, 1 << 20))
    encoder = encoder_of(server, sender)
    told = zmq.Context().socket(zmq.PULL)
    told.rcvtimeo = 20_000
    port = told.bind_to_random_port("tcp://127.0.0.1")
    torch.manual_seed(3)

    def send(embedding: torch.Tensor, address: int) -> Any:
        data = receiver.EmbeddingData("r", 1, 0, None, Modality.IMAGE, embedding)
        target = {"prefill_host": "127.0.0.1", "embedding_port": port}
        asyncio.run(encoder._send(embedding, data, language.session_id, address, **target))
        return pickle.loads(told.recv())  # what this test itself pickled

    for tokens in (3, 20, 300):
        embedding = torch.randn(tokens, 64)
        landing, address, slot = pool.alloc(embedding.nbytes)
        assert send(embedding, address).shape == [tokens, 64]
        assert torch.equal(landing.view(torch.float32).view(tokens, 64), embedding)
        pool.release(slot)
    language.close()
    with ends("transfer_sync failed", server.InternalError):
        send(torch.randn(3, 64), address)
    sender.close()


def test_the_embedding_cache() -> None:
    import torch
    from sglang.srt.mem_cache.embedding_store import EmbeddingStore, EmbeddingStoreFactory
    from transformers import AutoConfig

    from moonpool.connectors.sglang import compat

    args = SimpleNamespace(model_path=sys.argv[2], load_format="auto")
    config = AutoConfig.from_pretrained(sys.argv[2])
    compat.server_args = lambda: args
    compat.model_config = lambda args: SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
    for name in ("mooncake", "moonpool"):
        store = cast(Any, EmbeddingStoreFactory.create_backend(name))
        assert isinstance(store, EmbeddingStore)
        pages = torch.randn(6, 512)
        store.register_buffer(pages)
        row = pages[0].nbytes
        hashes = [f"{name}{n}" for n in range(2)]
        whole, cut = [pages[0].data_ptr()], [pages[n].data_ptr() for n in (3, 1)]
        assert store.batch_put_from_multi_buffers(hashes, [whole, cut], [[row], [row, row - 8]]) == [
            True,
            True,
        ]
        assert store.batch_is_exist([*hashes, "none"]) == [True, True, False]
        back = torch.zeros(6, 512)
        found = store.batch_get_into_multi_buffers(
            [hashes[1], "none"],
            [[back[0].data_ptr(), back[1].data_ptr()], [back[2].data_ptr()]],
            [[row, row - 8], [row]],
        )
        assert found == [True, False]
        assert torch.equal(back[0], pages[3])
        assert torch.equal(back[1][:-2], pages[1][:-2])
        assert store.batch_get(hashes[:1], [back[5].data_ptr()], [row]) == [True]
        assert torch.equal(back[5], pages[0])
        store.close()


def main() -> None:
    os.environ |= {settings.PD: "1", settings.EMBEDDINGS: "1", settings.NODE: sys.argv[1]}
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, flush=True)


if __name__ == "__main__":
    main()
