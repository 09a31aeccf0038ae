"""The command line. One module per verb; nothing heavy is imported before it is needed."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``aegis`` command."""
    import os

    # Our kernels have their own threads; numpy's BLAS would keep buffers and spin beside them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from aegis.cli import signals

        signals.install()
        from aegis.cli.app import run_command

        run_command()
    except (OSError, MemoryError, ImportError) as error:
        # Too few open files, too little memory or half an installation even for that.
        os.write(2, f"error: the command could not be loaded: {error!r}\n".encode())
        os._exit(1)
    except KeyboardInterrupt as ended:
        # Nothing is open here, and the interpreter's own way out could be struck once more.
        os._exit(getattr(ended, "exit_code", 130))
