"""Writer of consolidated weights by Megatron's names, in files for the Hugging Face tools."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.named_regions import named_regions
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import new_directory
from megatron_flashckpt.convert.common.safetensors_files import write_files


def write_safetensors(contents: Contents, directory: Path, options: Options) -> Path:
    """Write all weights and buffers into `directory`, the index last; return it.

    Raises:
        ConfigError: the directory is not empty and may not be replaced.
    """
    regions = sorted(named_regions(contents.tensors), key=lambda region: region.name)
    tensors = [region.stored() for region in regions]
    # If the path is a link, replace its target, not the link.
    with new_directory(directory.resolve(), overwrite=options.overwrite) as fresh:
        write_files(fresh, tensors, options.shard_nbytes)
    return directory
