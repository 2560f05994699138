"""Requirement of `redundancy` beyond those of the package: pyzmq."""

from __future__ import annotations

from megatron_flashckpt.errors import ConfigError


def require_pyzmq() -> None:
    """Return if pyzmq can be imported. Checked by a rank at startup, and by its agent on use.

    Raises:
        ConfigError: pyzmq is missing or broken; the message names the extra that installs it.
    """
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"'redundancy' needs pyzmq, which this node cannot import ({error}); install it on all "
            "nodes (pip install 'megatron_flashckpt[redundancy]'), or set 'redundancy: none'"
        ) from error
