"""Makes real SGLang run on a machine without CUDA, for tests only: a platform of its own, and plain torch in
place of the kernels that copy between the engine's memory and HiCache's.

The engine sees it through the entry points that ``install`` writes; nothing of SGLang is changed on disk.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ENTRY_POINTS = """\
[sglang.srt.platforms]
torchcpu = sglang_cpu:platform
[sglang.srt.plugins]
torchcpu = sglang_cpu:register
"""


def install(folder: Path) -> None:
    """Writes into ``folder`` what makes an engine with it in PYTHONPATH load this module."""
    info = folder / "sglang_cpu-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-cpu\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "sglang_cpu.py").write_text(Path(__file__).read_text())
    (folder / "sitecustomize.py").write_text("import sglang_cpu\nsglang_cpu.let_torchvision_import()\n")


def let_torchvision_import() -> None:
    """At the start of the process. torchvision's operators may be those of a CUDA build, which cannot be
    loaded; then its import fails where it describes them to torch. No language model uses them."""
    sys.meta_path.insert(0, _Undescribed())


class _Undescribed(MetaPathFinder, Loader):
    """An empty module in place of those descriptions."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torchvision._meta_registrations":
            return None
        from torchvision.extension import _has_ops

        return None if _has_ops() else ModuleSpec(name, self)

    def exec_module(self, module: object) -> None: ...


def platform() -> str:
    return "sglang_cpu.TorchCpuPlatform"


def register() -> None:
    """Stands in for what torch and SGLang have on CUDA only."""
    import torch
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # of 10 GB: others run here, too
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *args: torch.cpu.current_stream()
    common._cuda_host_register = lambda *args, **kwargs: None
    if not _has_capabilities():
        from sglang.srt.mem_cache.allocator import paged

        paged.alloc_extend_kernel = _Kernel(
            lambda before, lengths, last, free, out, _, page: paged.alloc_extend_naive(
                before, lengths, last, free, out, page, "cpu"
            )
        )
        paged.alloc_decode_kernel = _Kernel(_next_slots)
    for module in (mha, mla):
        module.transfer_kv_direct = _copy_layers
        module.transfer_kv_per_layer_direct_pf_lf = _load_layer
        module.transfer_kv_all_layer_direct_lf_pf = _save_layers


def __getattr__(name: str) -> Any:
    if name != "TorchCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms import interface
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum

    class TorchCpuPlatform(CpuDeviceMixin, interface.SRTPlatform):
        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        if _has_capabilities():
            capabilities = interface.PlatformCapabilities(supports_triton=False)

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def is_pin_memory_available(self, device: object = None) -> bool:
            return False

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

    return TorchCpuPlatform


def _has_capabilities() -> bool:
    """Whether a platform can say that it has no Triton; 0.5.18 does not ask."""
    from sglang.srt.platforms import interface

    return hasattr(interface, "PlatformCapabilities")


class _Kernel:
    """Called as Triton's are: kernel[grid](arguments)."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getitem__(self, grid: object) -> Any:
        return self._call


def _next_slots(lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    """The slot of each request's next token: behind its last one, or the first of a new page."""
    new = (lengths - 1) % page == 0
    out.copy_(last + 1)
    out[new] = free[: int(new.sum())] * page


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *args: object) -> None: ...
    def query(self) -> bool:
        return True


def _unpinned(make: Any) -> Any:
    def made(*args: object, **kwargs: object) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


# SGLang names the arguments; layer_id and page_size are as in its kernels.


def _copy_layers(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _load_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices.view(-1, page_size)[:, 0] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        found = source[pages, layer_id]
        target[dst_indices] = found.reshape(-1, *found.shape[2:])


def _save_layers(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    pages = dst_indices.view(-1, page_size)[:, 0] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for plane, target in enumerate(dst_ptrs):
        for layer in range(layers):
            found = src_ptrs[plane * layers + layer][src_indices]
            target[pages, layer] = found.view(-1, page_size, *found.shape[1:])
