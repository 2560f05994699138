"""Program that uses the GPU once: it fails in a process that was forked after CUDA had begun."""

from __future__ import annotations

import torch


def main() -> None:
    torch.zeros(1, device="cuda").add_(1).cpu()


if __name__ == "__main__":
    main()
