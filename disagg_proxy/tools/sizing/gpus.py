"""The peak compute of GPUs: 10^12 floating-point operations a second of dense bfloat16 products, by their
makers' data sheets. No engine reaches it in prefill; a real one is slower, so that even a slower link is
worth it."""

from __future__ import annotations

from collections.abc import Mapping

TFLOPS: Mapping[str, float] = {
    "a100": 312,
    "a800": 312,
    "b200": 2250,
    "h100": 989,
    "h20": 148,
    "h200": 989,
    "h800": 989,
    "l4": 121,
    "l40s": 362,
    "mi300x": 1307,
    "rtx4090": 165,
}
