"""
Cross-entropy on held-out text: nats per token, perplexity, bits per byte.

The data are the ``eval`` shards of a tokenised corpus (``data_utils/tokenize_from_pretrain_datasets.py``): raw
little-endian token ids, every document ended by EOS.

What is measured (``windows="stream"``): a shard is one stream of tokens ``s_0 .. s_{N-1}``, documents one after the
other as in training. It is cut into non-overlapping windows of the training sequence length ``T``: window ``w`` reads
``s_{wT} .. s_{wT+T-1}`` and predicts ``s_{wT+1} .. s_{wT+T}``. So every token of the shard but its first is predicted
exactly once, EOS included, with the context that its window gives it; the last window may be shorter. Shards are not joined.
Bits per byte divide the total by the UTF-8 bytes of the predicted tokens, as decoded (after the tokenizer's NFC); EOS has
no bytes, but its cost counts.

The curve that training logs is the same measure (``config_utils.callbacks.HeldOutCallback``). OLMo-core's own
``LMEvaluator`` cuts otherwise: each document alone, its first ``T`` tokens only, its first token not
predicted. ``windows="document"`` does the same. The evaluator's own number is lower still: it counts one more position
for each document, the last, whose loss is zero by masking; it reports ``total_nats / (tokens + window_count)``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from config_utils.errors import UserError
from data_utils.errors import BadInput
from data_utils.shards import CorpusManifest, read_corpus
from olmo_core.data import TokenizerConfig
from olmo_core.nn.lm_head import LMOutputWithLoss
from olmo_core.nn.transformer import Transformer

Windows = Literal["stream", "document"]

IGNORE = -100

BATCH_TOKENS = {"cuda": 16_384, "cpu": 2_048}
"""Tokens in a batch by device. FP32 logits of 16,384 tokens take 3.3 GB; on two cores more than 2,048 is not faster."""


class Window(NamedTuple):
    """``inputs`` tokens from ``start`` are read, the ``targets`` tokens from ``start + 1`` are predicted."""

    file: int
    start: int
    inputs: int
    targets: int


@dataclass(frozen=True)
class HeldoutResult:
    """Sums over all predicted tokens, and what follows from them."""

    nll_nats: float
    tokens: int
    """Predicted tokens, EOS included."""
    bytes: int
    """UTF-8 bytes of the predicted tokens; EOS has none."""
    documents: int
    """Predicted EOS tokens: the documents that were read to their end."""
    window_count: int
    sequence_length: int
    windows: str
    files: list[str]

    @property
    def cross_entropy(self) -> float:
        """Nats per token."""
        return self.nll_nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.cross_entropy)

    @property
    def bits_per_byte(self) -> float:
        return self.nll_nats / math.log(2) / self.bytes if self.bytes else math.nan

    def as_dict(self) -> dict:
        """For the results file: units in the keys."""
        return {
            "cross_entropy_nats_per_token": self.cross_entropy,
            "perplexity_per_token": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "total_nats": self.nll_nats,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "documents": self.documents,
            "window_count": self.window_count,
            "sequence_length_tokens": self.sequence_length,
            "windows": self.windows,
            "files": self.files,
        }


class HeldoutData:
    """
    The held-out shards of a tokenised corpus.

    :param root: The tokeniser's ``--output-dir``.
    :param tokenizer_config: Of the model; the corpus must have been made with the same vocabulary and EOS.
    :param max_tokens: Read only this many tokens from the start of each shard.

    :raises UserError: If the folder is no complete corpus, has no held-out shard or another tokenizer.
    """

    def __init__(
        self, root: Path, tokenizer_config: TokenizerConfig, *, max_tokens: int | None = None
    ):
        try:
            self.manifest: CorpusManifest = read_corpus(root)
        except BadInput as e:
            raise UserError(str(e)) from None
        made_with = self.manifest.tokenizer
        for what, theirs, ours in (
            ("vocabulary size", made_with.vocab_size, tokenizer_config.vocab_size),
            ("EOS id", made_with.eos_token_id, tokenizer_config.eos_token_id),
        ):
            if theirs != ours:
                raise UserError(
                    f"{root} was tokenised with {what} {theirs}, the checkpoint's is {ours}: evaluate on a corpus of "
                    "the checkpoint's tokenizer"
                )
        self.paths = self.manifest.paths(root, "eval")
        if not self.paths:
            raise UserError(
                f"{root} has no held-out shard: tokenise one with --eval-parquet-path, or pass --no-heldout"
            )
        self.names = [s.path for s in self.manifest.eval]
        self.eos_token_id = tokenizer_config.eos_token_id
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.streams = [
            np.memmap(p, mode="r", dtype=dtype)[: max_tokens or None] for p in self.paths
        ]
        for path, stream in zip(self.paths, self.streams, strict=True):
            largest = max(
                (int(stream[i : i + _BLOCK].max()) for i in range(0, len(stream), _BLOCK)),
                default=0,
            )
            if largest >= tokenizer_config.vocab_size:
                raise UserError(
                    f"{path} has the token id {largest}, but the vocabulary has {tokenizer_config.vocab_size}: it is "
                    "damaged; run the tokeniser again with --skip-existing"
                )

    def windows(self, kind: Windows, sequence_length: int) -> Iterator[Window]:
        """In the order of the shards; see the module's text for the two kinds."""
        for file, stream in enumerate(self.streams):
            if kind == "stream":
                for start in range(0, len(stream) - 1, sequence_length):
                    n = min(sequence_length, len(stream) - 1 - start)
                    yield Window(file, start, n, n)
            else:
                start = 0
                for eos in np.flatnonzero(np.asarray(stream) == self.eos_token_id):
                    n = min(sequence_length, int(eos) + 1 - start)
                    # A document of EOS alone predicts nothing, as in the in-loop evaluator.
                    if n > 1:
                        yield Window(file, start, n, n - 1)
                    start = int(eos) + 1

    def tokens(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, int64."""
        stream, start = self.streams[window.file], window.start
        return (
            stream[start : start + window.inputs].astype(np.int64),
            stream[start + 1 : start + 1 + window.targets].astype(np.int64),
        )


_BLOCK = 1 << 22


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """
    UTF-8 bytes that each token of a byte-level tokenizer stands for, ``[vocab_size]``, int64; special tokens have none.

    A table rather than decoding: a window may begin or end inside a character, which decoding would replace.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    out = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, i in vocabulary.items():
        if i not in added:
            out[i] = len(token)  # byte-level BPE spells every byte as one character
        elif not added[i].special:
            out[i] = len(added[i].content.encode())
    return out


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From inputs and targets, int64 ``[B, T]`` (:data:`IGNORE` where nothing is predicted), to FP32 nats ``[B, T]``."""


def model_loss(model: Transformer) -> TokenLoss:
    """The loss of a model that is in evaluation mode."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = model(
            inputs,
            labels=targets,
            ignore_index=IGNORE,
            loss_reduction="none",
            return_logits=False,
        )
        assert isinstance(output, LMOutputWithLoss)
        return output.ce_loss

    return loss


@torch.no_grad()
def evaluate_heldout(
    loss: TokenLoss,
    data: HeldoutData,
    *,
    device: torch.device,
    sequence_length: int,
    byte_lengths: np.ndarray,
    pad_token_id: int,
    batch_size: int | None = None,
    windows: Windows = "stream",
    max_windows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeldoutResult:
    """
    Cross-entropy of a model on held-out shards. The same on every call and for every number of processes: batches are
    fixed, and the windows' sums are added in their order with ``math.fsum``. In a distributed run each process takes its
    share of the batches, and all get the result.

    :param loss: :func:`model_loss`, or that of a training module.
    :param device: Where ``loss`` wants its inputs.
    :param sequence_length: Tokens in a window: of the training.
    :param byte_lengths: :func:`token_byte_lengths`.
    :param batch_size: Windows in a batch; default :data:`BATCH_TOKENS`.
    :param max_windows: Read only the first so many windows.
    :param progress: Is told the number of done and of all batches.

    :raises UserError: If there is no token to predict.
    """
    if windows not in get_args(Windows):
        raise UserError(
            f"unknown windows '{windows}': choose one of {', '.join(get_args(Windows))}"
        )
    if batch_size is None:
        batch_size = max(1, BATCH_TOKENS.get(device.type, 2_048) // sequence_length)
    all_windows = list(data.windows(windows, sequence_length))
    if max_windows is not None:
        all_windows = all_windows[:max_windows]
    if not all_windows:
        raise UserError(f"{', '.join(map(str, data.paths))}: no token to predict")
    batches = [all_windows[i : i + batch_size] for i in range(0, len(all_windows), batch_size)]
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    sums: dict[int, list[float]] = {}
    n_bytes = n_documents = 0
    for first in range(0, len(batches), world_size):
        # Each process runs the model equally often: under FSDP a forward pass is a collective. The spare passes at
        # the end repeat the last batch.
        i = min(first + rank, len(batches) - 1)
        # Every batch has one shape, since a compiled model would be compiled anew for another one.
        inputs = np.full((batch_size, sequence_length), pad_token_id, dtype=np.int64)
        targets = np.full((batch_size, sequence_length), IGNORE, dtype=np.int64)
        for row, window in enumerate(batches[i]):
            x, y = data.tokens(window)
            inputs[row, : len(x)], targets[row, : len(y)] = x, y
        nll = loss(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        if first + rank != i:
            continue
        sums[i] = nll.view(batch_size, sequence_length).double().sum(dim=1).tolist()
        predicted = targets[targets != IGNORE]
        n_bytes += int(byte_lengths[predicted].sum())
        n_documents += int((predicted == data.eos_token_id).sum())
        if progress is not None:
            progress(min(len(sums) * world_size, len(batches)), len(batches))

    if world_size > 1:
        parts: list = [None] * world_size
        dist.all_gather_object(parts, (sums, n_bytes, n_documents))
        sums = {i: s for part, _, _ in parts for i, s in part.items()}
        n_bytes = sum(b for _, b, _ in parts)
        n_documents = sum(d for _, _, d in parts)
    return HeldoutResult(
        nll_nats=math.fsum(x for i in range(len(batches)) for x in sums[i][: len(batches[i])]),
        tokens=sum(w.targets for w in all_windows),
        bytes=n_bytes,
        documents=n_documents,
        window_count=len(all_windows),
        sequence_length=sequence_length,
        windows=windows,
        files=data.names,
    )
