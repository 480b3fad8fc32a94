"""Writes a GGUF file again in another of llama.cpp's number formats, by the quantisation in `xllamacpp`'s library.

llama.cpp's own tool is not part of that package. The choice of each tensor's format follows it, and so does the way out
where rows are no multiple of the 256 numbers of a K format. The source has few bits already, so the copy is good
for measuring speed and says nothing about a format's accuracy.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from gguf.quants import quant_shape_to_byte_shape

HEAD = ("token_embd.weight", "output.weight")
# The formats of rows that are no multiple of 256 numbers.
OTHERWISE = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
K_ROW = 256


def _type_of(wanted: str, name: str, layers: int) -> Type:
    if name in HEAD:
        return Type.Q6_K
    if wanted != "Q4_K_M":
        return Type[wanted]
    layer, part = int(name.split(".")[1]), name.split(".")[2]
    eighth = layers // 8
    is_fine = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return Type.Q6_K if part in ("attn_v", "ffn_down") and is_fine else Type.Q4_K


def written_as(wanted: str, source: Path, target: Path, library: Path) -> Path:
    """Write `target` in `wanted`: `Q4_0`, `Q4_1` or `Q4_K_M`; `library` is xllamacpp's."""
    quantize: Any = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantize.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    quantize.restype = ctypes.c_size_t
    reader: Any = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    layers = reader.fields[f"{architecture}.block_count"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.tensor_type == Type.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        numbers = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = _type_of(wanted, tensor.name, layers)
        if numbers.shape[1] % K_ROW:
            kind = OTHERWISE.get(kind, kind)
        packed = np.empty(quant_shape_to_byte_shape(numbers.shape, kind), np.uint8)
        quantize(kind, numbers.ctypes.data, packed.ctypes.data, 0, *numbers.shape, None)
        writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    return target
