"""Element types as PyTorch, NCCL and C compilers spell them: bytes of an element, and whether it is an integer."""

from __future__ import annotations

import re

__all__ = ["ELEMENT_BYTES", "element_bytes", "is_integer"]

ELEMENT_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "byte", "bool", "fp8", "f8e4m3", "f8e5m2", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "unsigned char", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "fp8_e4m3", "fp8_e5m2", "qint8", "quint8"), 1),
    **dict.fromkeys(("half", "float16", "fp16", "bf16", "bfloat16", "short", "int16", "uint16", "c10::half"), 2),
    **dict.fromkeys(("c10::bfloat16", "short int", "unsigned short"), 2),
    **dict.fromkeys(("float", "float32", "fp32", "int", "int32", "uint32", "c10::float", "unsigned int", "qint32"), 4),
    **dict.fromkeys(
        ("double", "float64", "fp64", "int64", "uint64", "long", "long int", "long long", "unsigned long"), 8
    ),
    **dict.fromkeys(("c10::complex<float>", "complex64", "complexfloat"), 8),
    **dict.fromkeys(("c10::complex<double>", "complex128", "complexdouble"), 16),
}
_FLOATING = re.compile(r"float|half|double|fp|complex|bf16|f8e")


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element; `None` where the type is unknown.

    >>> element_bytes("Half"), element_bytes("long int"), element_bytes("opaque")
    (2, 8, None)
    """
    return ELEMENT_BYTES.get(dtype.strip().lower())


def is_integer(dtype: str) -> bool:
    """Whether a known type holds integers.

    >>> is_integer("unsigned char"), is_integer("c10::BFloat16"), is_integer("opaque")
    (True, False, False)
    """
    return element_bytes(dtype) is not None and not _FLOATING.search(dtype.lower())
