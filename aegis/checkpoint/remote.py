"""A checkpoint that is on the hub: its headers are known, its files are not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aegis.checkpoint.config import ModelConfig
from aegis.checkpoint.hub_cache import HubName
from aegis.checkpoint.plainfile import parse_object
from aegis.checkpoint.safetensors import parse_header
from aegis.checkpoint.source import Checkpoint, join
from aegis.checkpoint.vocabulary import Vocabulary, unmade
from aegis.errors import TokenizerError

TEXT = "latin-1"
"""How bytes travel between processes inside of JSON: each is a character."""


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """Its path is where the hub's cache will keep it; nothing of it can be read there yet."""

    name: HubName
    commit: str
    sizes: Mapping[str, tuple[int, str]]
    """Bytes and hash of every file that is to be downloaded."""
    vocabulary: Vocabulary

    @property
    def missing_nbytes(self) -> int:
        """What there is to download, without what other attempts have brought."""
        blobs, missing = self.name.folder / "blobs", 0
        for file, (size, digest) in self.sizes.items():
            if (self.path / file).exists() or (blobs / digest).exists():
                continue
            partial = blobs / f"{digest}.incomplete"
            missing += max(0, size - (partial.stat().st_size if partial.exists() else 0))
        return missing

    @property
    def tokenizer_nbytes(self) -> int:
        """The size of tokenizer.json, or of one that takes the memory of what stands for it."""
        return self.vocabulary.nbytes(lambda file: self.sizes[file][0])

    @classmethod
    def described(cls, name: HubName, found: Mapping[str, Any]) -> RemoteCheckpoint:
        """From what ``aegis.hub.worker`` says of it.

        Raises:
            CheckpointError: headers are damaged, or contradict each other or the index.
            TokenizerError: there is no tokenizer.json, and none can be made.
        """
        sizes = {file: (int(size), str(digest)) for file, (size, digest) in found["files"].items()}
        config = ModelConfig(_object(found["config"]), f"config.json of {name}")
        said = {} if found["tokenizer"] is None else _object(found["tokenizer"])
        vocabulary = Vocabulary.among(sizes, said, config.model_type)
        if vocabulary is None:
            raise TokenizerError(
                f"{name} has no tokenizer.json{unmade(sizes, said)}; download it into a folder,"
                " have transformers write one"
                f" (AutoTokenizer.from_pretrained({name.repo!r}).save_pretrained(FOLDER)), and"
                " give that folder"
            )
        folder = name.folder / "snapshots" / found["commit"]
        index = None if found["index"] is None else _object(found["index"])
        headers = {
            file: parse_header(folder / file, sizes[file][0], header.encode(TEXT))
            for file, header in found["headers"].items()
        }
        tensors = join(folder, index, headers)
        files = tuple(folder / file for file in headers)
        commit = found["commit"]
        return cls(folder, config, tensors, files, name, commit, sizes, vocabulary)


def _object(text: str) -> dict[str, Any]:
    return parse_object(text.encode(TEXT))
