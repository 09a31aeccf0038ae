"""Every damage that a checkpoint or a store is tried with, and the words that it is refused in."""

from __future__ import annotations

from typing import Any

from damages import (
    DEEP,
    HUGE_INTEGER,
    INDEX,
    MODEL,
    SCALES,
    SEQUENCE,
    SHARDS,
    UNKNOWN,
    Case,
    Damage,
    added,
    also,
    config,
    directory,
    duplicated_shard,
    endless,
    entry,
    flipped,
    halve,
    header,
    header_text,
    index,
    manifest,
    misnumbered,
    overlapping,
    pipe,
    placed,
    quantization,
    raw_header,
    remove,
    replace,
    reshaped,
    resize,
    retyped,
    sparse,
    surplus,
    swapped_shards,
    tokenizer,
    twice,
    values,
    without,
    write,
)
from stores import edit_header

CONFIG = [
    Case("config missing", remove("config.json"), r"config\.json is missing"),
    Case("config empty", write("config.json", b""), r"config\.json is empty"),
    Case("config cut", halve("config.json"), r"config\.json is not valid JSON"),
    Case("config garbled", write("config.json", bytes(range(256))), "is not valid JSON"),
    Case("config no UTF-8", replace("config.json", b"silu", b"\xff\xfe"), "is not valid JSON"),
    Case("config a list", write("config.json", b"[1]"), "holds a list; expected a JSON object"),
    Case("config a directory", directory("config.json"), r"config\.json is a directory"),
    Case("config a pipe", pipe("config.json"), r"config\.json is not a regular file"),
    Case("config endless", endless("config.json"), r"config\.json is not a regular file"),
    Case("config nested deep", write("config.json", DEEP), "nested too deep"),
    Case(
        "config of many parts",
        write("config.json", b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"),
        "implausibly large",
    ),
    Case("config of a GiB", sparse("config.json", 1 << 30), "implausibly large"),
    Case(
        "config huge integer",
        replace("config.json", b": 128,", b": " + HUGE_INTEGER + b","),
        "a number has thousands of digits",
    ),
    Case(
        "config key twice",
        replace("config.json", b'"hidden_size": 128', b'"hidden_size": 128, "hidden_size": 64'),
        "hidden_size twice",
    ),
    Case("config NaN", replace("config.json", b"1e-06", b"NaN"), "NaN, which JSON does not have"),
    Case("config infinite", replace("config.json", b"1e-06", b"1e999"), "rms_norm_eps to inf"),
    Case("no model_type", config(model_type=None), "lacks model_type"),
    Case("another family", config(model_type="llama"), "'llama' is not supported"),
    Case("model_type a number", config(model_type=7), "model_type to 7; expected a string"),
    Case("hidden_size missing", config(hidden_size=None), "lacks hidden_size"),
    Case("hidden_size text", config(hidden_size="128"), "hidden_size to '128'; expected a whole"),
    Case("hidden_size 0", config(hidden_size=0), "hidden_size to 0; expected a whole number from"),
    Case("hidden_size negative", config(hidden_size=-128), "hidden_size to -128; expected"),
    Case("hidden_size absurd", config(hidden_size=10**12), "hidden_size to 1000000000000; exp"),
    Case("layers absurd", config(num_hidden_layers=10**12), "num_hidden_layers to 10+; expected"),
    Case("layers one more", config(num_hidden_layers=4), r"lacks .*layers\.3\."),
    Case("layers one less", config(num_hidden_layers=2), r"holds model\.layers\.2\."),
    Case("layers none", config(num_hidden_layers=0), "num_hidden_layers to 0; expected"),
    Case("experts absurd", config(num_experts=10**12), "num_experts to 10+; expected"),
    Case("experts one less", config(num_experts=7), r"codes of \[7, 128\] take"),
    Case("heads 0", config(num_attention_heads=0), "num_attention_heads to 0; expected"),
    Case("heads not shared out", config(num_key_value_heads=3), "4 attention heads .* 3 key"),
    Case("odd head_dim", config(head_dim=33), "head_dim to 33; expected an even"),
    Case("top-k above", config(num_experts_per_tok=9), "num_experts_per_tok to 9, .* 8 experts"),
    Case("top-k 0", config(num_experts_per_tok=0), "num_experts_per_tok to 0; expected"),
    Case("context absurd", config(max_position_embeddings=10**15), "max_position_embeddings to 1"),
    Case("eps negative", config(rms_norm_eps=-1), "rms_norm_eps to -1; expected"),
    Case("eps beyond float", config(rms_norm_eps=10**400), "rms_norm_eps to 10+.*; expected"),
    Case("theta 0", config(rope_theta=0), "rope_theta to 0; expected"),
    Case("theta text", config(rope_theta="1e4"), "rope_theta to '1e4'; expected a number"),
    Case("rope a list", config(rope_parameters=[1]), "rope_parameters to .*expected an object"),
    Case("layer types 5", config(layer_types=5), "layer_types to 5"),
    Case("tied text", config(tie_word_embeddings="no"), "tie_word_embeddings to 'no'; expected"),
    Case("vocabulary one less", config(vocab_size=511), "lm_head.weight|embed_tokens.weight"),
    Case("maths changed", config(rope_scaling={"type": "yarn"}), "rope_scaling to .* changes the"),
]

QUANTIZATION = [
    Case(
        "quantization missing",
        config(quantization=None, quantization_config=None),
        "is quantised, but config.json has no quantization entry",
    ),
    Case("quantization a list", config(quantization=[]), "quantization to .*expected an object"),
    Case("bits missing", config(quantization={"group_size": 64}), "quantization lacks bits"),
    Case("bits text", quantization(bits="4"), r"quantization\.bits to '4'; expected"),
    Case("bits 8", quantization(bits=8), "8-bit codes of .* take"),
    Case("bits absurd", quantization(bits=10**12), r"quantization\.bits to 10+; expected"),
    Case("bits 7", quantization(bits=7), "7-bit codes are not supported"),
    Case("groups of 16", quantization(group_size=16), "groups of 16 are not supported"),
    Case("groups of 32", quantization(group_size=32), r"scales has the shape .* config says"),
    Case("groups of 0", quantization(group_size=0), r"quantization\.group_size to 0; expected"),
    Case("another method", config(quantization={"quant_method": "gptq", "bits": 4}), "'gptq'"),
    Case("another mode", quantization(mode="nvfp4"), "'nvfp4'"),
    Case("mxfp4 in other groups", quantization(mode="mxfp4"), "mxfp4 is codes of 4 bits in groups"),
    Case("affine as mxfp4", quantization(mode="mxfp4", group_size=32), "as BF16; expected U8"),
    Case("affine as published mxfp4", quantization(quant_method="mxfp4"), "as BF16; expected U8"),
    Case("unknown key", quantization(zero_point="none"), r"quantization\.zero_point to 'none'"),
    Case("entry a number", quantization(**{"model.norm": 4}), r"quantization\.model\.norm to 4"),
    Case(
        "entry says unquantised",
        quantization(lm_head=False),
        "lm_head.weight is quantised, but .* not quantised",
    ),
    Case(
        "entry says quantised",
        quantization(**{"model.norm": {"bits": 4, "group_size": 64}}),
        "model.norm.weight should be quantised, since config.json says",
    ),
    Case(
        "entry of one module wrong",
        quantization(lm_head={"bits": 3, "group_size": 64}),
        "lm_head.weight has the shape .* 3-bit",
    ),
]

TENSORS = [
    Case("tensors missing", remove(MODEL), "model.safetensors is missing|no model"),
    Case("tensors empty", write(MODEL, b""), "model.safetensors is empty"),
    Case("tensors of 7 bytes", write(MODEL, bytes(7)), "not a whole safetensors file"),
    Case("tensors cut by a byte", resize(MODEL, -1), r"is truncated: .* download it again"),
    Case("tensors cut in half", halve(MODEL), r"is truncated: "),
    Case("tensors too long", resize(MODEL, 1), "1 byte.* no tensor"),
    Case("tensors a directory", directory(MODEL), "model.safetensors is a directory"),
    Case("tensors a pipe", pipe(MODEL), "model.safetensors is not a regular file"),
    Case("tensors endless", endless(MODEL), "model.safetensors is not a regular file"),
    Case("header past the end", raw_header(b"{}", 1 << 20), "header claims 1048576 bytes"),
    Case("header of 2^63", raw_header(b"{}", 1 << 63), "header claims 9223372036854775808"),
    Case("header empty", raw_header(b""), "damaged header"),
    Case("header garbled", raw_header(b"\x93\xff" * 50), "damaged header"),
    Case("header a list", raw_header(b"[]"), "damaged header.* a list"),
    Case("header nested deep", raw_header(DEEP), "damaged header.* nested too deep"),
    Case(
        "header of many parts",
        raw_header(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"),
        "implausibly large",
    ),
    Case(
        "header huge integer",
        header_text(lambda text: text.replace(b"[0,", b"[" + HUGE_INTEGER + b",", 1)),
        "damaged header.* a number has thousands of digits",
    ),
    Case(
        "header absurd shape",
        entry("model.norm.weight", shape=[10**4000] * 50),
        "damaged header entry for model.norm.weight",
    ),
    Case("tensor twice", header_text(twice), "lists lm_head.biases twice"),
    Case(
        "many tensors, the last twice",
        raw_header(b"{" + b"".join(b'"%d":1,' % n for n in range(60_000)) + b'"t":1,"t":1}'),
        "lists t twice",
    ),
    Case("offset negative", entry("lm_head.scales", data_offsets=[-8, 8]), "damaged header entry"),
    Case("offsets absurd", entry("lm_head.scales", data_offsets=[0, 10**30]), "lm_head.scales"),
    Case("ranges overlap", header(overlapping), "over another tensor"),
    Case("dtype unknown", entry("lm_head.scales", dtype="Q4"), "lm_head.scales as 'Q4'"),
    Case("dtype longer", entry("lm_head.scales", dtype="F32"), "lm_head.scales .* takes"),
    Case(
        "scales and biases differ",
        entry("lm_head.biases", dtype="F16"),
        "lm_head.biases is F16, but its scales are BF16",
    ),
    Case("dtype of no number", retyped("model.norm.weight", "I16"), "norm.weight is stored as I16"),
    Case("dtype f64", retyped("model.norm.weight", "F64"), "norm.weight is stored as F64"),
    Case(
        "codes of another type",
        entry("lm_head.weight", dtype="I32"),
        "lm_head.weight is stored as I32; expected U32",
    ),
    Case(
        "shape transposed",
        reshaped("lm_head.scales", lambda shape: shape[::-1]),
        "lm_head.scales has the shape",
    ),
    Case(
        "shape flat",
        reshaped("lm_head.scales", lambda shape: [shape[0] * shape[1]]),
        "lm_head.scales has the shape",
    ),
    Case("norm missing", without("model.norm.weight"), "lacks the tensor norm.weight"),
    Case("scales missing", without(SCALES), "up_proj.weight .* lacks its scales|lacks .*scales"),
    Case(
        "biases missing",
        without(SCALES.replace("scales", "biases")),
        r"lacks the tensor .*up_proj\.biases",
    ),
    Case(
        "experts missing",
        without(*(SCALES.replace("scales", part) for part in ("scales", "biases", "weight"))),
        "lacks the experts of layer 1",
    ),
    Case("surplus tensor", surplus("model.layers.1.mlp.extra.weight"), "holds .*extra.weight"),
    Case("surplus layer", surplus("model.layers.9.input_layernorm.weight"), r"layers\.9"),
    Case("the same name twice", surplus("language_model.model.norm.weight"), "the same tensor"),
    Case("name no text", surplus("\ud800.rotary_emb.inv_freq"), "damaged header"),
    Case("name of two lines", surplus("a\nb"), "damaged header"),
    Case("NaN scale", values(SCALES, 0x7FC0), f"{SCALES} .* not finite"),
    Case("infinite scale", values(SCALES, 0xFF80), f"{SCALES} .* not finite"),
    Case("NaN norm", values("model.norm.weight", 0x7F81), "norm.weight .* not finite"),
    Case(
        "infinite projection bias",
        values("model.layers.0.self_attn.k_proj.bias", 0x7F80),
        "k_proj.bias .* not finite",
    ),
]

SHARDED = [
    *(
        Case(f"shard {n} missing", remove(name), f"{name} is missing")
        for n, name in enumerate(SHARDS, 1)
    ),
    Case("shard cut", halve(SHARDS[1]), f"{SHARDS[1]} is truncated"),
    Case("shard empty", write(SHARDS[1], b""), f"{SHARDS[1]} is empty"),
    Case("shard a directory", directory(SHARDS[1]), f"{SHARDS[1]} is a directory"),
    Case("shard a pipe", pipe(SHARDS[1]), f"{SHARDS[1]} is not a regular file"),
    Case("shards swapped", swapped_shards, "which does not hold it"),
    Case("shard in the place of another", duplicated_shard, "holds .* in .* and in"),
    Case("index empty", write(INDEX, b""), f"{INDEX} is empty"),
    Case("index cut", halve(INDEX), f"{INDEX} is not valid JSON"),
    Case("index garbled", write(INDEX, b"\xff\x00" * 99), f"{INDEX} is not valid JSON"),
    Case("index a directory", directory(INDEX), f"{INDEX} is a directory"),
    Case("index a pipe", pipe(INDEX), f"{INDEX} is not a regular file"),
    Case("index nested deep", write(INDEX, DEEP), "nested too deep"),
    Case("index without map", index(lambda data: data.pop("weight_map")), "has no weight_map"),
    Case(
        "index wrong shard",
        placed("model.norm.weight", SHARDS[0]),
        f"places model.norm.weight in {SHARDS[0]}, which does not hold it",
    ),
    Case("index names a ghost", placed("ghost", SHARDS[0]), "places ghost in"),
    Case("index outside", placed("x", "../x.safetensors"), "no file name"),
    Case("index no string", placed("x", 3), "no file name"),
    Case("index long name", placed("x", "x" * 5000), "no file name"),
    Case("index zero byte", placed("x", "a\0b"), "no file name"),
    Case(
        "index key twice",
        replace(INDEX, b'"model.norm.weight": ', b'"lm_head.weight": "x", "model.norm.weight": '),
        "lm_head.weight twice",
    ),
    Case("shards misnumbered", misnumbered, "not one complete set of shards"),
]

SEES, SEEN = (f"model-0000{n}-of-00006.safetensors" for n in (5, 6))
_SEES, _SEEN = "model.visual.blocks.0.norm1.bias", "model.visual.pos_embed.weight"

VISION = [
    Case("vision shard missing", remove(SEEN), f"{SEEN} is missing"),
    Case("vision shard cut", resize(SEEN, -1), f"{SEEN} is truncated"),
    Case("vision shard longer", resize(SEEN, 1), f"{SEEN} .* no tensor"),
    Case("vision tensor in two shards", added(SEEN, _SEES), f"holds {_SEES} in {SEES} and in"),
    Case(
        "vision tensor under two names",
        also(added(SEEN, "visual.pos_embed.weight"), placed("visual.pos_embed.weight", SEEN)),
        "holds both .*pos_embed.weight and .*pos_embed.weight, which are the same tensor",
    ),
    Case(
        "vision tensor not in the index",
        index(lambda data: data["weight_map"].pop(_SEEN)),
        f"does not list {_SEEN}, which {SEEN} holds",
    ),
    Case("vision tensor elsewhere", placed(_SEEN, SEES), f"{_SEEN} in {SEES}, which does not"),
    Case(
        "vision tensor of no type",
        lambda folder: edit_header(folder / SEEN, lambda data: data[_SEEN].update(dtype="Q4")),
        f"stores {_SEEN} as 'Q4'",
    ),
    Case(
        "vision tensor of another size",
        lambda folder: edit_header(folder / SEEN, lambda data: data[_SEEN].update(shape=[16, 65])),
        f"gives {_SEEN} 2048 bytes, but BF16 .* takes 2080",
    ),
    Case(
        "beside vision",
        also(added(SEEN, "model.visuals.x"), placed("model.visuals.x", SEEN)),
        "holds model.visuals.x, which a model of this family does not use",
    ),
]
"""Damage to a vision-language checkpoint in six files."""

TEXT = [
    Case("tokenizer missing", remove("tokenizer.json"), "tokenizer.json is missing|cannot be read"),
    Case("tokenizer empty", write("tokenizer.json", b""), "tokenizer.json .*download it again"),
    Case("tokenizer cut", halve("tokenizer.json"), "tokenizer.json .*download it again"),
    Case("tokenizer garbled", write("tokenizer.json", bytes(range(256)) * 9), "tokenizer.json"),
    Case("tokenizer a list", write("tokenizer.json", b"[]"), "tokenizer.json .*download it again"),
    Case("tokenizer without model", write("tokenizer.json", b'{"version":"1.0"}'), "tokenizer.j"),
    Case("tokenizer nested deep", write("tokenizer.json", DEEP), "tokenizer.json"),
    Case("tokenizer a directory", directory("tokenizer.json"), "tokenizer.json is a directory"),
    Case("tokenizer a pipe", pipe("tokenizer.json"), "tokenizer.json is not a regular file"),
    Case("tokenizer endless", endless("tokenizer.json"), "tokenizer.json is not a regular file"),
    Case("tokenizer of 8 GiB", sparse("tokenizer.json", 8 << 30), "tokenizer.json .*large"),
    # These make the library that reads them panic: on reading, on text, on what surrounds a text.
    Case(
        "tokenizer panics when read",
        tokenizer(lambda data: data["model"].update(continuing_subword_prefix="BPE")),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    Case(
        "tokenizer panics on text",
        tokenizer(lambda data: data.update(normalizer={"type": "Prepend", "prepend": ""})),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    Case(
        "tokenizer names an unknown token",
        tokenizer(lambda data: data["post_processor"].update(single=[UNKNOWN, SEQUENCE])),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    Case(
        "tokenizer loses the text",
        tokenizer(lambda data: data["post_processor"].update(single=[])),
        "post_processor .* cannot be used .*loses the text",
    ),
    Case(
        "added token without content",
        tokenizer(lambda data: data["added_tokens"][0].pop("content")),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    Case(
        "added token with surplus",
        tokenizer(lambda data: data.update(added_tokens=[{"id": -1, "content": "a", "x": 1}])),
        "tokenizer.json is not a tokenizer that can be read",
    ),
    Case(
        "tokenizer of another model",
        tokenizer(
            lambda data: data["model"]["vocab"].update({f"t{n}": n for n in range(512, 600)})
        ),
        "tokenizer.json has 600 tokens, but the model only 512",
    ),
    Case("tokenizer config cut", halve("tokenizer_config.json"), "tokenizer_config.json"),
    Case("tokenizer config a list", write("tokenizer_config.json", b"[]"), "tokenizer_config"),
    Case("tokenizer config deep", write("tokenizer_config.json", DEEP), "tokenizer_config.json"),
    Case("tokenizer config a directory", directory("tokenizer_config.json"), "tokenizer_config"),
    Case("tokenizer config a pipe", pipe("tokenizer_config.json"), "tokenizer_config"),
    Case("bos a number", write("tokenizer_config.json", b'{"bos_token":5}'), "bos_token"),
    Case("generation config cut", write("generation_config.json", b"{"), "generation_config.json"),
    Case(
        "end token text", write("generation_config.json", b'{"eos_token_id":"x"}'), "eos_token_id"
    ),
    Case("end token in a list of lists", config(eos_token_id=[[1]]), "eos_token_id"),
    Case("template a directory", directory("chat_template.jinja"), "chat_template.jinja"),
]

CHECKPOINT = [*CONFIG, *QUANTIZATION, *TENSORS, *TEXT]
"""Damage to a checkpoint of one file."""


def _resident(name: str, **keys: Any) -> Damage:
    def edit(data: dict[str, Any]) -> None:
        next(t for t in data["resident"] if t["name"] == name).update(keys)

    return manifest(edit)


def _drop_resident(name: str) -> Damage:
    def edit(data: dict[str, Any]) -> None:
        data["resident"] = [t for t in data["resident"] if t["name"] != name]

    return manifest(edit)


STORE = [
    Case("store.json empty", write("store.json", b""), "store.json is damaged|store.json is empty"),
    Case("store.json cut", resize("store.json", -1), "store.json is damaged"),
    Case("store.json flipped", flipped("store.json", 900), "store.json is damaged"),
    Case("store.json nested deep", write("store.json", DEEP), "store.json is damaged"),
    Case("store.json of 8 GiB", sparse("store.json", 8 << 30), "store.json .*large"),
    Case(
        "newer version",
        manifest(lambda data: data.update(format_version=99)),
        "format version 99.* newer .*convert the model again",
    ),
    Case(
        "newer version of another kind",
        write("store.json", b'{"format":"aegis store","format_version":99,"new":[]}'),
        "format version 99.* newer",
    ),
    Case(
        "older version",
        manifest(lambda data: data.update(format_version=0)),
        "format version 0.*convert the model again",
    ),
    Case(
        "version flipped",
        replace("store.json", b'"format_version":', b'"format_version":1'),
        r"is damaged \(checksum mismatch\)",
    ),
    Case(
        "version a fraction",
        manifest(lambda data: data.update(format_version=float(data["format_version"]))),
        r"format version \d\.0; this aegis reads",
    ),
    Case(
        "config of another model",
        manifest(lambda data: data["config"].update(vocab_size=600)),
        "holds embed_tokens with the shape .*convert the model again",
    ),
    Case("version true", manifest(lambda data: data.update(format_version=True)), "version True"),
    Case("experts 10^12", manifest(lambda data: data.update(num_experts=10**12)), "is damaged"),
    Case("no layers", manifest(lambda data: data.update(moe_layers=[])), "is damaged"),
    Case("layers text", manifest(lambda data: data.update(moe_layers=list("abc"))), "is damaged"),
    Case("checksum negative", _resident("norm", crc32=-1), "is damaged"),
    Case("checksum text", _resident("norm", crc32="x"), "is damaged"),
    Case("shape of fractions", _resident("norm", shape=[128.0]), "is damaged"),
    Case("shape wrong", _resident("norm", shape=[64]), "is damaged|norm"),
    Case("tensor missing", _drop_resident("norm"), "is damaged|norm"),
    Case(
        "file outside",
        manifest(lambda data: data["files"].update({"../../etc/passwd": [1, 2]})),
        "is damaged",
    ),
    Case("resident missing", remove("resident.bin"), "resident.bin .*convert the model again"),
    Case("resident cut", resize("resident.bin", -1), "resident.bin has .* bytes, but"),
    Case("resident longer", resize("resident.bin", 1), "resident.bin has .* bytes, but"),
    Case("resident a directory", directory("resident.bin"), "resident.bin is a directory"),
    Case("resident a pipe", pipe("resident.bin"), "resident.bin is not a regular file"),
    Case("resident flipped", flipped("resident.bin", 4096 * 3 + 1), "the tensor .* is damaged"),
    Case("layer missing", remove("experts/layer_001.bin"), "layer_001.bin .*convert the model ag"),
    Case("layer cut", resize("experts/layer_001.bin", -1), "layer_001.bin has .* bytes, but"),
    Case("layer empty", write("experts/layer_001.bin", b""), "layer_001.bin has 0 bytes, but"),
    Case("layer a directory", directory("experts/layer_001.bin"), "layer_001.bin is a directory"),
    Case("tokenizer missing", remove("tokenizer.json"), "tokenizer.json .*convert the model again"),
    Case("tokenizer flipped", flipped("tokenizer.json", 3000), "tokenizer.json is damaged"),
    Case("tokenizer a directory", directory("tokenizer.json"), "tokenizer.json is a directory"),
    Case("config flipped", flipped("config.json", 700), "config.json is damaged"),
]
"""Damage to a store."""

STORE_FILES = [case for case in STORE if case.words.split()[0].endswith((".bin", ".json"))]
STORE_FILES = [case for case in STORE_FILES if not case.words.startswith("store.json")]


def _vision(**keys: Any) -> Damage:
    return manifest(lambda data: data["vision"].update(keys))


VISION_STORE = [
    Case("vision missing", remove("vision.safetensors"), "vision.safetensors is missing; convert"),
    Case("vision cut", resize("vision.safetensors", -1), "vision.safetensors has .* bytes, but"),
    Case("vision longer", resize("vision.safetensors", 1), "vision.safetensors has .* bytes, but"),
    Case("vision a pipe", pipe("vision.safetensors"), "vision.safetensors is not a regular file"),
    Case("vision null", manifest(lambda data: data.update(vision=None)), "is damaged"),
    Case("vision of no bytes", _vision(nbytes=0), "is damaged"),
    Case("vision of text", _vision(nbytes="4096"), "is damaged"),
    Case("vision with a surplus", _vision(name="x"), "is damaged"),
    Case("vision of other bytes", _vision(nbytes=4097), "vision.safetensors has .* bytes, but"),
    Case("vision checksum negative", _vision(crc32=-1), "is damaged"),
    Case(
        "vision without checksum",
        manifest(lambda data: data["vision"].pop("crc32")),
        "is damaged",
    ),
]
"""Damage to a store with tensors that are kept for later."""
