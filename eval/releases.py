"""
The released checkpoints: one table, (method, scale) -> Hugging Face repository.

Methods and scales are called as ``launch.sh`` calls them. A repository has one folder for each learning rate (``lr5e-4``,
``lr1e-3``, ...) with ``config.json`` and the weights.
"""

from config_utils.errors import UserError

RELEASES: dict[tuple[str, str], str] = {
    ("preln", "400m"): "davidgonmar/depth-memory-400m-preln",
    ("attnres_full", "400m"): "davidgonmar/depth-memory-400m-attnres-full",
    ("attnres_block", "400m"): "davidgonmar/depth-memory-400m-attnres-block",
    ("mhc", "400m"): "davidgonmar/depth-memory-400m-mhc",
    ("ldm", "400m"): "davidgonmar/depth-memory-400m-ldm",
    ("ldm_k4", "400m"): "davidgonmar/depth-memory-400m-ldm-dk4",
    ("preln", "1p5b"): "davidgonmar/depth-memory-1.5b-preln",
    ("attnres_block", "1p5b"): "davidgonmar/depth-memory-1.5b-attnres-block",
    ("mhc", "1p5b"): "davidgonmar/depth-memory-1.5b-mhc",
    ("ldm", "1p5b"): "davidgonmar/depth-memory-1.5b-ldm",
}


def repository(method: str, scale: str) -> str:
    """
    The repository of a method at a scale.

    :raises UserError: If that pair was not released.
    """
    try:
        return RELEASES[method, scale]
    except KeyError:
        known = ", ".join(f"{s} {m}" for m, s in RELEASES)
        raise UserError(
            f"there is no release of {method} at {scale}; released are {known}"
        ) from None
